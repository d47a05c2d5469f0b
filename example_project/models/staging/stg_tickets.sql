-- The web form sends an empty text where the mailbox and the chat send nothing, and a seed file
-- cannot tell the two apart. So the difference between '' and NULL is restored here.
select
    ticket_id,
    created_at,
    cast({{ dbt.date_trunc('month', 'created_at') }} as date) as created_month,
    channel,
    case when channel = 'web' then coalesce(subject, '') else subject end as subject,
    case when channel = 'web' then coalesce(body, '') else body end as body,
    order_ref
from {{ ref('support_tickets') }}
