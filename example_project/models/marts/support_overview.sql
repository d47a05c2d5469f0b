-- Tickets by month, channel and sentiment. The share is of the month's tickets in that channel
-- that have an answer; tickets without one are counted beside it, never in it.
with labelled as (

    select
        created_month,
        channel,
        sentiment,
        wants_refund,
        order_number,
        llm_status
    from {{ ref('ticket_labels') }}

),

answered as (

    select
        created_month,
        channel,
        sentiment,
        count(*) as tickets,
        sum(case when wants_refund then 1 else 0 end) as refund_requests,
        count(order_number) as with_order_number
    from labelled
    where llm_status = 'ok'
    group by created_month, channel, sentiment

),

totals as (

    select
        created_month,
        channel,
        sum(case when llm_status = 'ok' then 1 else 0 end) as answered_tickets,
        sum(case when llm_status = 'ok' then 0 else 1 end) as unanswered_tickets
    from labelled
    group by created_month, channel

)

select
    totals.created_month,
    totals.channel,
    coalesce(answered.sentiment, '(unanswered)') as sentiment,
    cast(coalesce(answered.tickets, totals.unanswered_tickets) as bigint) as tickets,
    cast(round(1.0 * answered.tickets / totals.answered_tickets, 3) as numeric(5, 3)) as share,
    cast(answered.refund_requests as bigint) as refund_requests,
    cast(answered.with_order_number as bigint) as with_order_number,
    cast(totals.unanswered_tickets as bigint) as unanswered_tickets
from totals
left join answered
    on totals.created_month = answered.created_month
    and totals.channel = answered.channel
