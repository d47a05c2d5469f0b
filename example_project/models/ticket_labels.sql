-- The shop's order numbers lie between 200000 and 209999. The numbers in the prompt's examples do
-- not, so a model that copies an example instead of the ticket cannot slip one in.
{{ config(
    materialized = 'llm',
    unique_key = 'ticket_id',
    meta = {'llm': {
        'model': 'local/smollm2-135m',
        'prompt': 'prompts/ticket_labels.md',
        'returns': {
            'order_number': {'type': ['integer', 'null'], 'minimum': 200000, 'maximum': 209999},
            'sentiment': {'enum': ['negative', 'positive']}
        }
    }}
) }}

select
    ticket_id,
    created_at,
    created_month,
    channel,
    order_ref,
    subject,
    body
from {{ ref('stg_tickets') }}
