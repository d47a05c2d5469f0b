-- How often the model gave the golden label. Only answered tickets are compared, so
-- `compared` falls below `golden` while answers are pending.
with pairs as (

    select
        golden.order_number as golden_order_number,
        golden.sentiment as golden_sentiment,
        answers.order_number,
        answers.sentiment,
        coalesce(answers.llm_status, 'missing') = 'ok' as is_answered
    from {{ ref('golden_labels') }} as golden
    left join {{ ref('ticket_labels') }} as answers
        on golden.ticket_id = answers.ticket_id

),

comparisons as (

    -- A ticket that names no order should have no order number.
    select
        'order_number' as label,
        is_answered,
        order_number is not distinct from golden_order_number as is_equal
    from pairs

    union all

    -- No golden sentiment means that the ticket is neither positive nor negative.
    select
        'sentiment' as label,
        is_answered,
        sentiment is not distinct from golden_sentiment as is_equal
    from pairs
    where golden_sentiment is not null

),

counted as (

    select
        label,
        count(*) as golden,
        sum(case when is_answered then 1 else 0 end) as compared,
        sum(case when is_answered and is_equal then 1 else 0 end) as agreed
    from comparisons
    group by label

)

select
    label,
    golden,
    cast(compared as bigint) as compared,
    cast(agreed as bigint) as agreed,
    cast(round(1.0 * agreed / nullif(compared, 0), 3) as numeric(5, 3)) as share
from counted
