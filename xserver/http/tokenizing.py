"""`POST /tokenize` and `/detokenize`, as in vLLM."""

from typing import Any

from xserver.http.schemas import DetokenizeRequest, TokenizeChat, TokenizePrompt
from xserver.http.served_model import ServedModel
from xserver.text.conversation import prompt_of


def tokenize(body: TokenizePrompt | TokenizeChat, model: ServedModel) -> dict[str, Any]:
    """Return the tokens of a text or of a conversation.

    A text gets special tokens unless the client switches them off.
    """
    if isinstance(body, TokenizePrompt):
        ids = model.encode(body.prompt, body.add_special_tokens is not False)
    else:
        ids = model.encode(prompt_of(body, model), bool(body.add_special_tokens), "messages")
    names = [model.tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": model.spec.longest_request, "tokens": ids, "token_strs": names}


def detokenize(body: DetokenizeRequest, model: ServedModel) -> dict[str, Any]:
    """Return the text of tokens, including special tokens."""
    return {"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)}
