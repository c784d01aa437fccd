"""vLLM's own events of what was stored, for routers that follow where KV is."""

from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import Request


def stored(request: Request, start: int, stop: int, block_tokens: int) -> BlockStored | None:
    """The event for tokens `start` to `stop` of a request, whole blocks; None where vLLM has no hashes of
    them."""
    first, last = start // block_tokens, stop // block_tokens
    hashes = request.block_hashes[:last]
    if len(hashes) < last:
        return None
    lora = request.lora_request
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(one) for one in hashes[first:]],
        parent_block_hash=maybe_convert_block_hash(hashes[first - 1]) if first else None,
        token_ids=list(request.all_token_ids[start:stop]),
        block_size=block_tokens,
        lora_id=lora.lora_int_id if lora is not None else None,
        medium=MEDIUM_CPU,
        lora_name=lora.lora_name if lora is not None else None,
    )
