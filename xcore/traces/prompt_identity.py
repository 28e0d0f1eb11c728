"""PromptIdentity: what is known of a prompt's tokens, so that prompts that begin alike are recognised."""

from dataclasses import dataclass, replace

from xcore.noun import Noun


@dataclass(frozen=True)
class PromptIdentity(Noun):
    """What a trace says of one prompt's tokens. Two prompts of a trace begin alike as far as any of it says so."""

    token_ids: tuple[int, ...] = ()
    """The tokens themselves."""
    block_ids: tuple[int | str, ...] = ()
    """A name for each block of tokens, the last of which may be partial: prompts whose first blocks have the same names
    have the same tokens there.
    """
    block_tokens: int = 0
    """Tokens of a block."""
    prefix: str | None = None
    """The name of a text that the prompt begins with."""
    prefix_tokens: int = 0
    """How many tokens of it."""
    conversation: str | None = None
    """The conversation of which it is a turn: it continues the turn before it, prompt and answer."""
    chat: str | None = None
    """Its own name, for those that continue it."""
    parent_chat: str | None = None
    """The name of the request whose prompt and answer it continues."""

    def scaled(self, factor: float) -> "PromptIdentity":
        """Return the identity of a prompt whose length is multiplied; tokens can't be, and are left out."""
        block, prefix = (max(1, round(n * factor)) if n else 0 for n in (self.block_tokens, self.prefix_tokens))
        return replace(self, token_ids=(), block_tokens=block, prefix_tokens=prefix)
