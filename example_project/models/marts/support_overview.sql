-- Tickets by month, channel and sentiment. `share` is of the answered tickets of that month and
-- channel; tickets without an answer stand in a row of their own.
with labelled as (

    select
        created_month,
        channel,
        case when llm_status = 'ok' then sentiment else '(unanswered)' end as sentiment,
        order_number,
        order_ref,
        llm_status
    from {{ ref('ticket_labels') }}

),

counted as (

    select
        created_month,
        channel,
        sentiment,
        count(*) as tickets,
        sum(case when llm_status = 'ok' then 1 else 0 end) as answered,
        sum(case when llm_status = 'ok' then 0 else 1 end) as unanswered,
        count(order_number) as with_order_number,
        sum(
            case when order_number is not null and order_ref is null then 1 else 0 end
        ) as order_only_in_text
    from labelled
    group by created_month, channel, sentiment

)

select
    created_month,
    channel,
    sentiment,
    tickets,
    cast(
        round(
            1.0 * answered
            / nullif(sum(answered) over (partition by created_month, channel), 0), 3
        ) as numeric(5, 3)
    ) as share,
    with_order_number,
    cast(order_only_in_text as bigint) as order_only_in_text,
    cast(unanswered as bigint) as unanswered
from counted
