-- How often the model and a person gave the same label. Only answered tickets are compared, so
-- `compared` falls below `golden` while answers are pending. An absent order number agrees with an
-- absent one.
{% set labels = ['order_number', 'sentiment', 'wants_refund'] %}

with pairs as (

    select
        {% for label in labels %}
        answers.{{ label }} as {{ label }}_answer,
        golden.{{ label }} as {{ label }}_golden,
        {% endfor %}
        coalesce(answers.llm_status, 'missing') = 'ok' as is_answered
    from {{ ref('golden_labels') }} as golden
    left join {{ ref('ticket_labels') }} as answers
        on golden.ticket_id = answers.ticket_id

)

{% for label in labels %}
select
    '{{ label }}' as label,
    count(*) as golden,
    cast(sum(case when is_answered then 1 else 0 end) as bigint) as compared,
    cast(sum(
        case
            when is_answered and {{ label }}_answer is not distinct from {{ label }}_golden then 1
            else 0
        end
    ) as bigint) as agreed,
    cast(round(
        1.0 * sum(
            case
                when is_answered and {{ label }}_answer is not distinct from {{ label }}_golden then 1
                else 0
            end
        ) / nullif(sum(case when is_answered then 1 else 0 end), 0), 3
    ) as numeric(5, 3)) as share
from pairs
{% if not loop.last %}union all{% endif %}

{% endfor %}
