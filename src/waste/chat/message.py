"""One turn of a conversation, its content kept apart from the markup around it."""

from __future__ import annotations

from dataclasses import dataclass

from waste.errors import UsageError

# Templates paste roles into control tokens (`<|im_{role}|>`), so a role is never free text.
ROLES = ("system", "user", "assistant", "tool", "developer")


@dataclass(frozen=True)
class Message:
    """`content` and `reasoning_content` are text as the user or the model wrote it: never markup.

    `reasoning_content` is the thought before an assistant's answer; None where there was none or it is not known.
    Raises UsageError for an unknown role.
    """

    role: str
    content: str
    reasoning_content: str | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise UsageError(f"message role {self.role!r} is not one of {', '.join(ROLES)}")

    def as_dict(self) -> dict[str, str]:
        """The mapping that chat templates expect; `reasoning_content` only where there is one."""
        fields = {"role": self.role, "content": self.content}
        if self.reasoning_content is not None:
            fields["reasoning_content"] = self.reasoning_content
        return fields
