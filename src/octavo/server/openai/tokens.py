"""Text to token ids and back, as the model sees them."""

import msgspec

from octavo.engine.front import EngineFront
from octavo.server.errors import bad_request
from octavo.server.openai.chat_plan import conversation, prompt_end
from octavo.server.openai.protocol import DetokenizeRequest, TokenizeRequest
from octavo.server.openai.replies import DetokenizeReply, TokenizeReply


def tokenize(request: TokenizeRequest, front: EngineFront) -> TokenizeReply:
    """Return the ids of a text, or of a conversation as the model's chat template writes it."""
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("Exactly one of 'prompt' and 'messages' is needed.", "prompt")
    tokenizer = front.tokenizer
    if request.messages is not None:
        tools = None if request.tools is None else [msgspec.to_builtins(tool) for tool in request.tools]
        options = {**(request.chat_template_kwargs or {}), "tools": tools, **prompt_end(request)}
        token_ids = tokenizer.encode_chat(conversation(request.messages, tokenizer), **options)
    else:
        token_ids = tokenizer.encode(request.prompt or "", add_special_tokens=request.add_special_tokens is not False)
    texts = [tokenizer.token_text(token_id) for token_id in token_ids] if request.return_token_strs else None
    return TokenizeReply(
        count=len(token_ids), max_model_len=front.config.model.max_model_len, tokens=token_ids, token_strs=texts
    )


def detokenize(request: DetokenizeRequest, front: EngineFront) -> DetokenizeReply:
    """Return the text of token ids."""
    vocab_size = front.config.model.vocab_size
    for index, token_id in enumerate(request.tokens):
        if not 0 <= token_id < vocab_size:
            text = f"tokens[{index}]={token_id}: token ids of this model are 0 to {vocab_size - 1}"
            raise bad_request(text, f"tokens[{index}]")
    return DetokenizeReply(prompt=front.tokenizer.decode(request.tokens, skip_special_tokens=False))
