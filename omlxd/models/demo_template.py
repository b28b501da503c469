"""The demo model's chat template: ChatML as Qwen and Hermes models write it, and append-only.

Append-only means that rendering turn k+1 begins with the rendering of turn k, so that nothing of a
cached prefix is lost. Four choices make it so:

- the tools stand in a block of their own, before every message;
- a system message is rendered where it stands, also in mid-conversation;
- thinking of earlier turns is kept, and an assistant turn without any holds an empty thinking block,
  just as the generation prompt does when thinking is off;
- an assistant turn reads `generation prompt + thinking + "\\n</think>\\n\\n" + text + calls`.

`mlx_lm` finds its `json_tools` parser by the words `<tool_call>` and `tool_call.name` in here.
"""

TEMPLATE = r"""
{%- macro text_of(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content is iterable -%}{%- for part in content -%}{{ part.text if part.text is defined else '' }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools %}{{- "<|im_start|>system\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
{%- for tool in tools %}{{- "\n" + (tool | tojson) }}{%- endfor %}
{{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == "user" or message.role == "system" %}
{{- "<|im_start|>" + message.role + "\n" + text_of(message.content) + "<|im_end|>\n" }}
{%- elif message.role == "assistant" %}
{{- "<|im_start|>assistant\n<think>\n" + (message.reasoning_content or "") + "\n</think>\n\n" + text_of(message.content) }}
{%- for call in message.tool_calls or [] %}
{%- set tool_call = call.function if call.function else call %}
{%- if not loop.first or message.content %}{{- "\n" }}{%- endif %}
{{- "<tool_call>\n{\"name\": " + (tool_call.name | tojson) + ", \"arguments\": " + (tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson) + "}\n</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\n" }}
{%- elif message.role == "tool" %}
{{- "<|im_start|>user\n<tool_response>\n" + text_of(message.content) + "\n</tool_response><|im_end|>\n" }}
{%- else %}{{- raise_exception("unknown role: " + message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\n<think>\n" }}
{%- if enable_thinking is defined and not enable_thinking %}{{- "\n</think>\n\n" }}{%- endif %}
{%- endif %}
""".strip()  # noqa: E501 -- a line break would be part of the prompt
