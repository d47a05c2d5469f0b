{#
  The llm materialization: a table whose extra columns a model answers.

  It holds no table logic of its own. The adapter's method batchsql_enrich evaluates the model's
  SELECT once, asks what is new, and returns the SELECT of the finished table; dbt's own table or
  incremental materialization then builds it, with contracts, grants, indexes and hooks as ever.
#}
{% materialization llm, default %}

  {%- if adapter.batchsql_enrich is not defined -%}
    {{ exceptions.raise_compiler_error(
        "the Python package batchsql is not installed beside dbt; run: pip install batchsql") }}
  {%- endif -%}

  {%- set existing_relation = load_cached_relation(this) -%}
  {%- set mergeable = existing_relation if (
        existing_relation is not none and existing_relation.is_table and not should_full_refresh()
      ) else none -%}

  {{ run_hooks(pre_hooks, inside_transaction=False) }}
  {{ run_hooks(pre_hooks, inside_transaction=True) }}

  {%- set enriched = adapter.batchsql_enrich(
        model, sql,
        macros_version=batchsql.package_version(),
        invocation_id=invocation_id,
        existing=mergeable,
        current=existing_relation,
        is_empty=flags.EMPTY
      ) -%}

  {%- if enriched['is_held'] -%}
    {%- do store_result('main', response=adapter.batchsql_finish(enriched['run_id'], model)) -%}
    {{ return({'relations': [existing_relation]}) }}
  {%- endif -%}

  {#- dbt's own materialization takes over: it sees the new SELECT, and the pre-hooks have run. -#}
  {%- do context.update({
        'sql': enriched['sql'], 'compiled_code': enriched['sql'], 'pre_hooks': []
      }) -%}
  {%- set kind = 'incremental' if enriched['incremental'] else 'table' -%}
  {%- set builder = context['materialization_' ~ kind ~ '_' ~ adapter.type()]
        or context['materialization_' ~ kind ~ '_default'] -%}
  {%- set relations = adapter.batchsql_build(enriched['run_id'], builder) -%}

  {%- set response = adapter.batchsql_finish(enriched['run_id'], model) -%}
  {%- do store_result('main', response=response) -%}

  {{ return(relations) }}

{% endmaterialization %}
