r"""The chat template of HelixTokenizer: Qwen3's layout, with the assistant's output in generation spans.

Two forms of one text. ``TRAINING_TEMPLATE`` marks what the assistant writes, from behind ``<|im_start|>assistant\n``
(the prompt supplies that) to ``<|im_end|>`` (not the line break after it), so that masks can be asked for.
``INFERENCE_TEMPLATE`` is the same without the tags, for engines whose Jinja does not know them.

* Reasoning from before the last question is dropped; the last answer gets a think block, empty where there is none.
* Only line breaks are trimmed, never spaces. Roles other than system, user, assistant and tool render nothing.
* The tags stand at top level, in ``for`` and ``if`` only: inside a macro or a set block their offsets are wrong, and
  nothing fails. Every tag trims the white space on both sides, so layout here cannot change the text.
"""

from __future__ import annotations

import re

TRAINING_TEMPLATE = r"""
{%- set state = namespace(pivot=messages|length - 1, searching=true) -%}
{%- for message in messages[::-1] -%}
  {%- if state.searching and message.role == 'user' and message.content is string
      and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) -%}
    {%- set state.searching = false -%}
    {%- set state.pivot = messages|length - loop.index -%}
  {%- endif -%}
{%- endfor -%}
{%- set opening = messages and messages[0].role == 'system' -%}
{%- if tools -%}
  {{- '<|im_start|>system\n' -}}
  {%- if opening -%}
    {{- messages[0].content if messages[0].content is string else '' -}}
    {{- '\n\n' -}}
  {%- endif -%}
  {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' -}}
  {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' -}}
  {%- for tool in tools -%}
    {{- '\n' -}}
    {{- tool|tojson -}}
  {%- endfor -%}
  {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within ' -}}
  {{- '<tool_call></tool_call> XML tags:\n<tool_call>\n' -}}
  {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set content = message.content if message.content is string else '' -%}
  {%- if message.role == 'user' or message.role == 'system' and not (loop.first and tools) -%}
    {{- '<|im_start|>' ~ message.role ~ '\n' -}}
    {{- content -}}
    {{- '<|im_end|>\n' -}}
  {%- elif message.role == 'assistant' -%}
    {%- set said = namespace(reasoning='', content=content) -%}
    {%- if message.reasoning_content is string -%}
      {%- set said.reasoning = message.reasoning_content -%}
    {%- elif '</think>' in content -%}
      {%- set said.reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
      {%- set said.content = content.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {%- set thinks = loop.index0 > state.pivot and (loop.last or said.reasoning) -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- generation -%}
      {%- if thinks -%}
        {{- '<think>\n' -}}
        {{- said.reasoning.strip('\n') -}}
        {{- '\n</think>\n\n' -}}
        {{- said.content.lstrip('\n') -}}
      {%- else -%}
        {{- said.content -}}
      {%- endif -%}
      {%- for call in message.tool_calls or [] -%}
        {%- set function = call.function or call -%}
        {%- if not loop.first or said.content -%}
          {{- '\n' -}}
        {%- endif -%}
        {{- '<tool_call>\n{"name": "' -}}
        {{- function.name -}}
        {{- '", "arguments": ' -}}
        {{- function.arguments if function.arguments is string else function.arguments|tojson -}}
        {{- '}\n</tool_call>' -}}
      {%- endfor -%}
      {{- '<|im_end|>' -}}
    {%- endgeneration -%}
    {{- '\n' -}}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}
      {{- '<|im_start|>user' -}}
    {%- endif -%}
    {{- '\n<tool_response>\n' -}}
    {{- content -}}
    {{- '\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}
      {{- '<|im_end|>\n' -}}
    {%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}
    {{- '<think>\n\n</think>\n\n' -}}
  {%- endif -%}
{%- endif -%}
"""

GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
INFERENCE_TEMPLATE = GENERATION_TAG.sub("", TRAINING_TEMPLATE)
