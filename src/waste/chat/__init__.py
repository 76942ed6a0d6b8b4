"""Conversations to token ids by the model's own template, and the answer split into reasoning and text."""

from __future__ import annotations

from waste.chat.format import ChatFormat
from waste.chat.message import Message
from waste.chat.parse import Piece, ReasoningSplitter
from waste.chat.render import render_ids
from waste.chat.template import ChatTemplate, find_template

__all__ = ["ChatFormat", "ChatTemplate", "Message", "Piece", "ReasoningSplitter", "find_template", "render_ids"]
