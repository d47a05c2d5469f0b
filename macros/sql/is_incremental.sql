{#
  Whether this run merges into a table that is there: dbt's own is_incremental() is always false in
  an llm model. Like dbt's, it is false in a model that is not declared incremental, whose table
  each run replaces. Use it to select only recent rows; older ones without an answer come along by
  themselves.
#}
{% macro is_incremental() %}
  {%- if not execute -%}
    {{ return(false) }}
  {%- endif -%}
  {%- set meta = model.config.get('meta') or {} -%}
  {%- set declared = {} -%}
  {%- for layer in (meta.get('llm_defaults'), meta.get('llm'), var('batchsql', none)) -%}
    {%- do declared.update(layer or {}) -%}
  {%- endfor -%}
  {%- set existing = load_cached_relation(this) if declared.get('incremental') else none -%}
  {{ return(existing is not none and existing.is_table and not should_full_refresh()) }}
{% endmacro %}
