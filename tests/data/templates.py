"""A byte-level tokenizer without a model, and chat templates of the kinds that are about."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGS_IN_MACRO = (  # the offsets of tags are wrong where a macro's text is joined to other text
    "{% macro turn(m) %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endmacro %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + turn(m) + '\n' }}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ '\n' }}{% endif %}{% endfor %}"
)
TAGS_ROUND_ALL = "{% for m in messages %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}"
TAGS_UNUSED = CHATML + "{% if false %}{% generation %}x{% endgeneration %}{% endif %}"
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
NO_MARKERS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ALTERNATING = "{% if messages[0].role != 'user' %}{{ raise_exception('must begin with user') }}{% endif %}" + CHATML
RAISING = "{{ raise_exception('this template takes nothing') }}"
MUTE = "{% for m in messages %}<|im_start|>{{ m.role }}<|im_end|>\n{% endfor %}"

# The layout of Qwen3, written from its rules: reasoning from before the last question is not rendered.
QWEN = """
{%- set ns = namespace(pivot=messages|length - 1, found=false) -%}
{%- for m in messages[::-1] -%}
  {%- if not ns.found and m.role == 'user' and m.content is string
      and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) -%}
    {%- set ns.found = true -%}{%- set ns.pivot = messages|length - 1 - loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{%- if tools -%}
  {{- '<|im_start|>system\n' -}}
  {%- if messages[0].role == 'system' -%}{{- messages[0].content + '\n\n' -}}{%- endif -%}
  {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' -}}
  {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' -}}
  {%- for tool in tools -%}{{- '\n' + tool|tojson -}}{%- endfor -%}
  {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within ' -}}
  {{- '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": ' -}}
  {{- '<args-json-object>}\n</tool_call><|im_end|>\n' -}}
{%- endif -%}
{%- for m in messages -%}
  {%- set content = m.content if m.content is string else '' -%}
  {%- if m.role == 'system' and not (loop.first and tools) or m.role == 'user' -%}
    {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' -}}
  {%- elif m.role == 'assistant' -%}
    {%- set part = namespace(reasoning='', content=content) -%}
    {%- if m.reasoning_content is string -%}
      {%- set part.reasoning = m.reasoning_content -%}
    {%- elif '</think>' in content -%}
      {%- set part.reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
      {%- set part.content = content.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if loop.index0 > ns.pivot and (loop.last or part.reasoning) -%}
      {{- '<think>\n' + part.reasoning.strip('\n') + '\n</think>\n\n' + part.content.lstrip('\n') -}}
    {%- else -%}
      {{- part.content -}}
    {%- endif -%}
    {%- for call in m.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {%- if not loop.first or part.content -%}{{- '\n' -}}{%- endif -%}
      {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' -}}
      {{- function.arguments if function.arguments is string else function.arguments|tojson -}}
      {{- '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- elif m.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\n<tool_response>\n' + content + '\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
"""


def byte_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token per byte, but for two line breaks in a row; <|im_start|>, <|im_end|> and </s> are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "ĊĊ"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "</s>"]})
    tokenizer.chat_template = template
    return tokenizer
