"""Codec tables made for tiny models: what is learnt is of the model, and the levels differ as they should."""

from pathlib import Path

import numpy as np
import pytest
import torch
from drawing import tokens

from kvass.calibrate.certify import as_stored
from kvass.calibrate.evaluate import evaluate
from kvass.calibrate.tables import LEVELS, make_tables
from kvass.calibrate.texts import Sequenced
from kvass.codecs.tables import Tables
from kvass.codecs.transform import Transform
from kvass.engines.transformers.load import LoadedModel
from kvass.engines.transformers.probing import Probing
from kvass.engines.transformers.runner import TransformersRunner
from kvass.errors import UnsupportedModelError
from kvass.keys import Namespace
from kvass.ropes import frequencies
from kvass.spec import RopeSpec


def _namespace(runner: TransformersRunner) -> Namespace:
    return Namespace(
        model="tiny", weights="w", config="c", adapter="", spec=runner.spec, tenant="", numerics="n"
    )


def test_gradients_are_those_of_what_the_model_draws(tiny: LoadedModel) -> None:
    """Held to the difference that a small change of K and V makes to the log-probability of the same draw."""
    runner = TransformersRunner(tiny, "float32")
    kv, following = runner.prefill(tokens(1, 90)), tokens(2, 12)
    found = next(Probing(tiny, runner.spec).gradients(kv, following, 1, seed=3))
    log = torch.from_numpy(runner.continue_over(kv, following))
    drawn = torch.multinomial(log.exp(), 1, generator=torch.Generator().manual_seed(3))
    draw = np.random.default_rng(4)
    for group, gradient in enumerate(found):
        for name, slope in (("k", gradient.k), ("v", gradient.v)):
            way = draw.standard_normal(slope.shape).astype(np.float32)
            ends = []
            for sign in (1, -1):
                moved = [dict(arrays) for arrays in kv]
                moved[group][name] = kv[group][name] + np.float32(sign * 1e-3) * way
                after = torch.from_numpy(runner.continue_over(moved, following))
                ends.append(float(after.gather(1, drawn).sum()))
            wanted = float((slope.astype(np.float64) * way).sum())
            assert (ends[0] - ends[1]) / 2e-3 == pytest.approx(wanted, rel=0.05, abs=0.05)


def test_queries_meet_the_keys_as_in_the_model(tiny: LoadedModel) -> None:
    runner = TransformersRunner(tiny, "float32")
    kv, following = runner.prefill(tokens(5, 30)), tokens(6, 1)
    queries = Probing(tiny, runner.spec).queries(kv, following)
    tiny.model.set_attn_implementation("eager")
    try:
        sequence = torch.tensor([[*tokens(5, 30), *following]])
        attention = tiny.model(input_ids=sequence, output_attentions=True).attentions
    finally:
        tiny.model.set_attn_implementation("sdpa")
    for number, group in enumerate(runner.spec.groups):
        assert group.rope is not None
        angles = 30 * frequencies(group.rope)
        for at, layer in enumerate(group.layers):
            query = queries[number][at, 0].astype(np.float64)
            half = group.head_dim // 2
            low, high = query[..., :half], query[..., half:]
            turned = np.concatenate(
                [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)],
                -1,
            )
            scores = np.einsum("hgd,thd->hgt", turned, kv[number]["k"][at])
            seen = attention[layer][0, :, -1, :30].double().numpy().reshape(scores.shape)
            ratio = np.log(seen) - scores  # the same for all keys of a query
            assert np.ptp(ratio, axis=-1).max() < 1e-3


def test_levels_cost_what_they_save(tiny: LoadedModel) -> None:
    runner = TransformersRunner(tiny)
    texts = [Sequenced(f"text {n}", "random", tokens(10 + n, 400), tokens(20 + n, 60)) for n in range(3)]
    namespace = _namespace(runner)
    probing = Probing(tiny, runner.spec)
    raw = make_tables(runner, probing, namespace, texts[:1], texts[1:2], lambda line: None)
    assert raw == make_tables(runner, probing, namespace, texts[:1], texts[1:2], lambda line: None)
    tables = Tables.parse(raw)
    coders = {level: as_stored(Transform(tables, level), namespace) for level in LEVELS}
    found = evaluate(runner, coders, texts[2:], [])
    bits = [found[level].bits for level in LEVELS]
    losses = [float(found[level].kl[0].mean()) for level in LEVELS]
    assert bits == sorted(bits, reverse=True)
    assert losses == sorted(losses)
    assert losses[0] < losses[-1] / 2


def test_a_rope_that_is_not_a_plain_turn_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="yarn"):
        frequencies(RopeSpec(kind="yarn", theta=1e4, rotary_dim=64))


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_frequencies_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {
        "default": {},
        "linear": {"factor": 4.0},
        "llama3": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }[kind]  # fmt: skip
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=65536,
        rope_parameters={"rope_type": kind, "rope_theta": 5e5, **parameters},
    )  # fmt: skip
    wanted = LlamaRotaryEmbedding(config).inv_freq.double().numpy()
    spec = RopeSpec(kind=kind, theta=5e5, rotary_dim=128, parameters=dict(parameters))
    np.testing.assert_allclose(frequencies(spec), wanted, rtol=1e-6)
