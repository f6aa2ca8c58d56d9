"""Small templates and messages of chats, and the text that is learned of a row."""

import numpy as np

from jtrain.data.text.chat_template import ChatTemplate
from jtrain.data.text.conversations import encode_conversation as encode
from jtrain.data.text.conversations import read_conversation
from jtrain.data.text.tokenizers import ByteTokenizer

# A small template with the constructs of Qwen's and Hermes's.
TOOLS = (
    "{%- if tools %}<s>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</s>\n"
    "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<s>user{% endif %}"
    "{{ '\n' }}<result>{{ m.content }}</result>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}</s>\n{% endif %}"
    "{% else %}<s>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls %}<call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</call>{% endfor %}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"if": "a<b", "°": 1}}}
OTHER = {"type": "function", "function": {"name": "sub"}}


def call(arguments, number: int = 1) -> dict:
    function = {"name": "add", "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def learned(template: str, row: dict, field: str = "messages", **options) -> tuple[str, str]:
    """Return the text of a row, and its answers."""
    conversation = read_conversation("a.jsonl:1", row, field)
    one = encode(ByteTokenizer(), ChatTemplate(template, "t.jinja"), *conversation, **options)
    text = lambda tokens: bytes(tokens.astype(np.uint8)).decode()
    return text(one.tokens), text(one.tokens[one.answers])
