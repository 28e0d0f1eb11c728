"""PromptIdentity: what is known of a prompt's tokens, to recognise common prefixes."""

from dataclasses import dataclass, replace

from xcore.spec import Spec


@dataclass(frozen=True)
class PromptIdentity(Spec):
    """What a trace tells about one prompt's tokens.

    Two prompts share the longest prefix that any of the fields implies.
    """

    token_ids: tuple[int, ...] = ()
    """The tokens themselves."""
    block_ids: tuple[int | str, ...] = ()
    """A name for each block of tokens; the last block may be partial.

    Prompts whose first blocks have the same names have the same tokens there.
    """
    block_tokens: int = 0
    """Tokens per block."""
    prefix: str | None = None
    """The name of a text that the prompt begins with."""
    prefix_tokens: int = 0
    """Tokens of that text in the prompt."""
    conversation: str | None = None
    """Its conversation: the prompt continues the previous turn, prompt and answer."""
    chat: str | None = None
    """Its own name, for prompts that continue it."""
    parent_chat: str | None = None
    """The name of the request whose prompt and answer it continues."""

    def scaled(self, factor: float) -> "PromptIdentity":
        """Return the identity of a prompt whose length is multiplied by `factor`, without its token ids."""
        block, prefix = (max(1, round(n * factor)) if n else 0 for n in (self.block_tokens, self.prefix_tokens))
        return replace(self, token_ids=(), block_tokens=block, prefix_tokens=prefix)
