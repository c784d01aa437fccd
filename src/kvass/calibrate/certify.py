"""The figures of a certificate: each codec as the store uses it, judged on held texts and planted facts."""

from collections.abc import Mapping, Sequence

import numpy as np

from kvass.calibrate.evaluate import Coder, Losses, Progress, evaluate
from kvass.calibrate.statistics import mean_interval, share_upper
from kvass.calibrate.tasks import FactContext
from kvass.calibrate.texts import Sequenced
from kvass.codecs.base import Chunk, Codec, tokens_behind
from kvass.container import Array, Encoded, Header
from kvass.keys import FORMAT_VERSION, Namespace, address, address_text, lossy_namespace
from kvass.provenance import EXACT, GUARD_TOKENS, Lossy, Provenance
from kvass.quality import Measured
from kvass.runner import KV, ModelRunner


def measure(
    runner: ModelRunner, codecs: Mapping[str, Coder], texts: Sequence[Sequenced],
    facts: Sequence[FactContext], progress: Progress = lambda done, total: None,
    guards: Mapping[str, int] | None = None,
) -> list[Measured]:  # fmt: skip
    """One `Measured` per codec, in order. `texts` and `facts` must not be what the codecs learned from;
    `guards`: see `guarded`.

    Raises as `kvass.calibrate.evaluate.evaluate` does.
    """
    found = evaluate(runner, codecs, texts, facts, progress, guards)
    return [summed_up(name, losses) for name, losses in found.items()]


def guarded(codecs: Mapping[str, Codec]) -> dict[str, int]:
    """Of the codecs that mind where a sequence ends, how many tokens are computed again where it is left
    earlier, as the cache does it."""
    return {name: GUARD_TOKENS for name, one in codecs.items() if one.end_aware}


def summed_up(codec: str, losses: Losses) -> Measured:
    """What was seen of one codec: means, with intervals over texts, and bounds over contexts."""
    mean, low, high = mean_interval([float(one.mean()) for one in losses.kl])
    return Measured(
        codec=codec,
        bits=losses.bits / losses.elements,
        kl_mean=mean,
        kl_low=low,
        kl_high=high,
        kl_early=float(np.mean(losses.early)) if losses.early else mean,
        kl_p99=float(np.quantile(np.concatenate(losses.kl), 0.99)),
        top1=float(np.mean([one.mean() for one in losses.agree])),
        ppl_ratio=float(np.exp(np.mean(losses.rise))),
        facts_tried=sum(losses.tried),
        facts_lost=sum(losses.lost),
        facts_lost_high=share_upper(losses.lost, losses.tried),
    )


def as_stored(codec: Codec, namespace: Namespace, chunk_tokens: int = 256, token_id: int = 99_999) -> Coder:
    """A codec as the store uses it: chunk by chunk, the last one shorter, each coded for where the sequence
    ends; bits are those of whole objects.

    `token_id` stands for each token in the headers, as no ids are at hand: the longest that the vocabulary
    has makes headers no smaller than they would be.
    """

    def coder(kv: KV) -> tuple[KV, int]:
        decoded = [{name: np.empty_like(array) for name, array in arrays.items()} for arrays in kv]
        tokens = kv[0]["k"].shape[1]
        stored_bytes = 0
        for start in range(0, tokens, chunk_tokens):
            stop = min(tokens, start + chunk_tokens)
            for number, group in enumerate(namespace.spec.groups):
                behind = tokens_behind(group, tokens, stop) if codec.end_aware else 0
                chunk = Chunk(group, number, start, stop - start, behind)
                arrays = {name: array[:, start:stop] for name, array in kv[number].items()}
                stored = codec.encode(arrays, chunk)
                stored_bytes += _object_bytes(codec, namespace, stored, chunk, token_id)
                for name, array in codec.decode(stored, chunk).items():
                    decoded[number][name][:, start:stop] = array
        return decoded, 8 * stored_bytes

    return coder


def _object_bytes(
    codec: Codec, namespace: Namespace, stored: Mapping[str, Array], chunk: Chunk, token_id: int
) -> int:
    key, step = bytes(32), codec.step()
    if codec.lossless:
        made: Provenance = EXACT
    else:
        namespace = lossy_namespace(namespace, codec.name)
        tables = str(step.parameters.get("tables", "0" * 64))
        made = Lossy(codec=codec.name, tables=tables, behind=chunk.behind)
    header = Header(
        digest="", format=FORMAT_VERSION, key=key.hex(), group=chunk.number, shard=0,
        parent=address_text(address(key, chunk.number)) if chunk.start else "", content_key=key.hex(),
        namespace=namespace, position=chunk.start, tokens=[token_id] * chunk.tokens, codec=[step],
        provenance=made, digests={},
    )  # fmt: skip
    return Encoded(header, stored).size
