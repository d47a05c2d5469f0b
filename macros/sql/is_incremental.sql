{#
  Whether this run merges into a table that is there: dbt's own is_incremental() is always false in
  an llm model. Use it to select only recent rows; older ones without an answer come along by
  themselves.
#}
{% macro is_incremental() %}
  {%- if not execute -%}
    {{ return(false) }}
  {%- endif -%}
  {%- set existing = load_cached_relation(this) -%}
  {{ return(existing is not none and existing.is_table and not should_full_refresh()) }}
{% endmacro %}
