"""Chat templates: from a conversation to the text of a prompt, in a sandbox with bounds on time and memory.

Imports nothing of Jinja until a template is used. Knows no tokenizer and no file: `ChatTemplate.from_metadata` takes
the metadata of a GGUF file as a mapping, `render_segments` says in which stretches a tokenizer may read control tokens.
"""

from __future__ import annotations

from .limits import Limits
from .template import ChatTemplate
from .text import Segment

__all__ = ["ChatTemplate", "Limits", "Segment"]
