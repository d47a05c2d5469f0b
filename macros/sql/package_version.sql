{# The version of these macros, which must be the version of the installed Python package. #}
{% macro package_version() %}
  {{ return('0.1.0') }}
{% endmacro %}
