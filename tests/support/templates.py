"""Chat templates in small, each as a family of models writes it, over the demo's tokenizer."""

from __future__ import annotations

QWEN3 = r"""
{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
{%- if (message.role == "user") or (message.role == "system") %}
{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
{%- elif message.role == "assistant" %}
{%- set reasoning_content = '' %}
{%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}
{%- else %}{%- if '</think>' in content %}
{%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}{%- endif %}
{%- if loop.index0 > ns.last_query_index %}
{%- if loop.last or (not loop.last and reasoning_content) %}
{{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}{%- endif %}
{%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}{%- endif %}
{%- if message.tool_calls %}{%- for tool_call in message.tool_calls %}
{%- if (loop.first and content) or (not loop.first) %}{{- '\n' }}{%- endif %}
{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
{%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
{{- '}\n</tool_call>' }}{%- endfor %}{%- endif %}
{{- '<|im_end|>\n' }}
{%- elif message.role == "tool" %}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' }}{{- content }}{{- '\n</tool_response>' }}
{%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""  # noqa: E501
"""Qwen3's own: thinking of turns before the last question is stripped."""

_OFF = r"""{%- if enable_thinking is defined and enable_thinking is false %}"""
QWEN3_THINKING = QWEN3.replace(
    _OFF + r"""{{- '<think>\n\n</think>\n\n' }}{%- endif %}""", r"""{{- '<think>\n' }}"""
)
"""Qwen3's of 2507, where the prompt to answer begins the thinking."""

DEEPSEEK = r"""{%- for m in messages %}
{%- if m.role == 'system' %}{{- m.content }}{%- elif m.role == 'user' %}{{- '<|im_start|>' + m.content }}
{%- elif m.role == 'tool' %}{{- '<|im_start|>[result]' + m.content }}
{%- elif m.role == 'assistant' %}{%- set content = m.content %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<think></think>' + content }}{%- for c in m.tool_calls or [] %}
{{- '[call]' + c.function.name + ' ' + (c.function.arguments | tojson) }}{%- endfor %}{{- '<|im_end|>' }}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<think>' }}{%- endif %}"""
"""Thinking is never rendered; the next message follows the end of the turn at once."""

GLM = r"""{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\n<think></think>\n' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}{{- '\n[call]' + c.function.name + (c.function.arguments | tojson) }}
{%- endfor %}{%- elif m.role == 'user' %}{{- '<|endoftext|>user\n' + m.content }}
{%- elif m.role == 'tool' %}{{- '<|im_end|>result\n' + m.content }}
{%- else %}{{- '<|im_start|>system\n' + m.content }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
"""No end of a turn of its own: the next message's head is what ends generation, but for a system's."""

HARMONY = r"""{%- set ns = namespace(tool=none) %}
{{- '<|start|>system<|message|>You are a model.\n# Valid channels: analysis, commentary, final.<|end|>' }}
{%- if messages[0].role in ('developer', 'system') %}{%- set told = messages[0].content %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set told = '' %}{%- set loop_messages = messages %}{%- endif %}
{%- if told or tools %}{{- '<|start|>developer<|message|>' + told }}
{%- for tool in tools or [] %}{%- set tool = tool.function %}
{{- '\n// ' + tool.description + '\ntype ' + tool.name + ' = (_: ' + (tool.parameters | tojson) + ') => any;' }}
{%- endfor %}{{- '<|end|>' }}{%- endif %}
{%- for message in loop_messages %}
{%- if message.role == 'assistant' and ('<|channel|>analysis<|message|>' in message.content or '<|channel|>final<|message|>' in message.content) %}
{{- raise_exception('You have passed a message containing <|channel|> tags in the content field.') }}{%- endif %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- set later = namespace(final=false) %}{%- for next in loop_messages[loop.index:] %}
{%- if next.role == 'assistant' and not next.tool_calls %}{%- set later.final = true %}{%- endif %}{%- endfor %}
{%- set call = message.tool_calls[0].function %}
{%- if message.content and message.thinking %}{{- raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') }}
{%- elif message.content and not later.final %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}
{%- elif message.thinking and not later.final %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}{%- set ns.tool = call.name %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' + (call.arguments | tojson) + '<|call|>' }}
{%- elif message.role == 'assistant' and loop.last and not add_generation_prompt %}
{%- if message.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- set ns.tool = none %}
{%- elif message.role == 'tool' %}{%- if ns.tool is none %}{{- raise_exception('Message has tool role, but there was no call') }}{%- endif %}
{{- '<|start|>functions.' + ns.tool + ' to=assistant<|channel|>commentary<|message|>' + (message.content | tojson) + '<|end|>' }}
{%- elif message.role == 'user' %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""  # noqa: E501
"""gpt-oss's: thinking and a call are messages of their own, a past answer ends with another tag than
generation does, and text beside both thinking and a call is refused."""
