"""Whose KV is whose: a namespace covers everything that changes the bytes, and nothing that does not."""

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from asking import ask
from tiny import REFUSED, build, plain, text, tiny
from transformers import AttentionInterface, LlamaForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

from kvass.cache import KVCache
from kvass.engines.transformers import Engine, attach, identify, kv_spec
from kvass.errors import UnsupportedModelError


def root(model: torch.nn.Module, **settings: Any) -> bytes:
    return identify(model, **settings).namespace.root()


def lora(seed: int = 0, *, model: PreTrainedModel | None = None, **settings: Any) -> Any:
    """A tiny Llama with a LoRA whose weights are not the initial ones, which do nothing."""
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 16, **settings})
    made = peft.get_peft_model(model or tiny("llama"), config).eval()
    _fill(made, seed)
    return made


def _fill(model: Any, seed: int, adapter: str = "default") -> None:
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if adapter in name.split("."):
                weight.copy_(torch.randn(weight.shape, generator=random) * 0.3)


# -- the same ---------------------------------------------------------------------------------------


def test_another_process_finds_the_same_namespace() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from tiny import tiny\n"
        "from kvass.engines.transformers import identify\n"
        "for name in ('llama', 'gemma3', 'gpt2'):\n"
        "    print(identify(tiny(name)).namespace.root().hex())\n"
    )
    there = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert there.stdout.split() == [root(tiny(name)).hex() for name in ("llama", "gemma3", "gpt2")]


def test_a_saved_and_loaded_model_is_the_same(tmp_path: Path) -> None:
    model = tiny("qwen3")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert root(again) == root(model)
    assert (
        identify(again).namespace.model != identify(model).namespace.model
    )  # a name, and no part of the root


def test_a_copy_is_the_same_and_nothing_is_hashed_twice() -> None:
    model = tiny("llama")
    known = identify(model)
    assert identify(model, known=known) is known
    assert root(copy.deepcopy(model)) == known.namespace.root()
    model(torch.tensor([[5, 6, 7]]))
    model.requires_grad_(True)
    assert identify(model, known=known) is known


def test_identifying_leaves_no_trace() -> None:
    model = tiny("gemma3")
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    model.train()
    kv_spec(model)
    assert torch.equal(torch.rand(3), wanted)
    assert all(module.training for module in model.modules())


# -- never the same ---------------------------------------------------------------------------------


def test_models_that_differ_in_anything() -> None:
    def epsilon(model: Any) -> Any:
        model.model.layers[1].input_layernorm.variance_epsilon = 0.1
        return model

    def scale(model: Any) -> Any:
        model.model.layers[0].self_attn.scaling = 0.5
        return model

    def frequencies(model: Any) -> Any:
        model.model.rotary_emb.inv_freq.mul_(0.5)  # a buffer that is not saved with the model
        return model

    def precision(model: Any) -> Any:
        model.set_attn_implementation("eager")
        return model

    base = tiny("llama")
    models: list[tuple[torch.nn.Module, dict[str, Any]]] = [
        (base, {}),
        (tiny("llama", seed=1), {}),
        (tiny("llama").to(torch.bfloat16), {}),
        (tiny("llama").to(torch.float16), {}),
        (precision(tiny("llama")), {}),
        (tiny("linear-rope"), {}),
        (tiny("llama3-rope"), {}),
        (tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 10001.0}), {}),
        (tiny("llama", rms_norm_eps=1e-5), {}),
        (tiny("llama", hidden_act="gelu"), {}),
        (tiny("llama", num_key_value_heads=4), {}),
        (tiny("mistral"), {}),
        (tiny("mistral", sliding_window=47), {}),
        (epsilon(tiny("llama")), {}),
        (scale(tiny("llama")), {}),
        (frequencies(tiny("llama")), {}),
        (base, {"tenant_salt": "secret"}),
        (base, {"tenant_salt": "other secret"}),
        (base, {"epoch": "1"}),
        (base, {"epoch": "2"}),
    ]
    roots = [root(model, **settings) for model, settings in models]
    assert len(set(roots)) == len(roots)
    assert "secret" not in repr(identify(base, tenant_salt="secret").namespace)


def test_reduced_precision_of_products_is_another_class_of_numerics() -> None:
    model = tiny("llama")
    known = identify(model)
    torch.set_float32_matmul_precision("medium")
    try:
        reduced = identify(model, known=known)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert reduced.namespace.root() != known.namespace.root()
    assert identify(model, known=reduced).namespace.root() == known.namespace.root()


def _step(
    optimizer: Callable[..., torch.optim.Optimizer], **settings: Any
) -> Callable[[PreTrainedModel], None]:
    def change(model: PreTrainedModel) -> None:
        model.requires_grad_(True)
        step = optimizer(model.parameters(), lr=0.01, **settings)
        model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
        step.step()
        model.requires_grad_(False)

    return change


def _add(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[3, 4] += 1


def _replace(model: Any) -> None:
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight * 2, requires_grad=False)


def _overwrite(model: Any) -> None:
    for weight in model.parameters():
        weight.data.mul_(1.01)  # leaves version counter and address as they were


def _swap(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj.weight.data = torch.ones(64, 64)


def _load(model: Any) -> None:
    model.load_state_dict(tiny("llama", seed=5).state_dict())


def _assign(model: Any) -> None:
    model.load_state_dict(tiny("llama", seed=5).state_dict(), assign=True)


@pytest.mark.parametrize(
    "change",
    [
        _step(torch.optim.SGD), _step(torch.optim.AdamW), _step(torch.optim.AdamW, fused=True),
        _add, _replace, _overwrite, _swap, _load, _assign,
    ],
    ids=["sgd", "adamw", "fused-adamw", "add", "replace", "data", "swap", "load", "assign"],
)  # fmt: skip
def test_weights_that_change_in_place(change: Callable[[PreTrainedModel], None], cache: KVCache) -> None:
    model, prompt = tiny("llama"), text(70)
    engine = Engine(model, cache)
    before = engine.namespace.root()
    ask(engine, prompt, 1)
    change(model)
    assert engine.namespace.root() != before
    asked = ask(engine, prompt, 8)
    assert asked.usage.cached_tokens == 0
    assert asked.tokens == plain(model, prompt, 8)[0]


def test_a_new_weight_at_the_address_of_an_old_one_is_noticed() -> None:
    model: Any = tiny("llama")
    known = identify(model)
    shape = model.model.norm.weight.shape
    for number in range(20):
        model.model.norm.weight = None
        model.model.norm.weight = torch.nn.Parameter(torch.full(shape, 2.0 + number), requires_grad=False)
        known, before = identify(model, known=known), known
        assert known.namespace.root() != before.namespace.root()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_tied_weights_are_hashed_once_and_seen_from_both_sides() -> None:
    tied: Any = tiny("llama", tie_word_embeddings=True)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    known = identify(tied)
    loose = copy.deepcopy(tied)
    loose.lm_head.weight = torch.nn.Parameter(loose.lm_head.weight.clone(), requires_grad=False)
    assert root(loose) != known.namespace.root()
    adapted = lora(1, model=copy.deepcopy(tied), target_modules=["q_proj", "embed_tokens"])
    with adapted.disable_adapter():
        assert root(adapted) == known.namespace.root()
    tied.lm_head.weight.add_(1)
    assert identify(tied, known=known).namespace.root() != known.namespace.root()


def test_a_model_made_in_inference_mode(cache: KVCache) -> None:
    # Its tensors count no versions.
    with torch.inference_mode():
        model = tiny("llama")
        prompt = text(70)
        engine = Engine(model, cache)
        assert engine.namespace.root() == root(tiny("llama"))
        ask(engine, prompt, 1)
        for weight in model.parameters():
            weight.mul_(1.01)
        asked = ask(engine, prompt, 4)
    assert (asked.usage.cached_tokens, asked.tokens) == (0, plain(model, prompt, 4)[0])


def test_a_config_that_is_changed_under_the_model() -> None:
    model = tiny("mistral")
    known = identify(model)
    model.config.sliding_window = 20  # the masks are made from it at each call
    assert identify(model, known=known).namespace.root() != known.namespace.root()


def test_weights_that_change_between_two_tokens_are_of_neither_model(cache: KVCache) -> None:
    model, prompt = tiny("llama"), text(70)
    engine = Engine(model, cache)
    steps = engine.generate(prompt)
    next(steps)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(2)
    next(steps)
    steps.close()
    cache.flush()
    assert not list(cache.entries())


# -- LoRA -------------------------------------------------------------------------------------------


def test_what_adapters_act_is_part_of_the_key() -> None:
    base = tiny("llama")
    one, two = lora(1), lora(2)
    roots = [
        root(base), root(one), root(two), root(lora(1, lora_alpha=8)), root(lora(1, use_rslora=True)),
        root(lora(1, use_dora=True)), root(lora(1, target_modules=["q_proj", "v_proj", "embed_tokens"])),
        root(lora(1, modules_to_save=["lm_head"])), root(lora(1, target_modules=["q_proj", "k_proj"])),
    ]  # fmt: skip
    assert len(set(roots)) == len(roots)
    assert root(lora(1)) == root(one)
    assert identify(one).namespace.weights == identify(base).namespace.weights


@pytest.mark.parametrize(
    "settings", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head", "embed_tokens"]}]
)
def test_an_adapter_that_is_off_leaves_the_plain_model(settings: dict[str, Any]) -> None:
    adapted = lora(1, **settings)
    on = identify(adapted)
    with adapted.disable_adapter():
        off = identify(adapted, known=on)
        assert off.namespace.root() == root(tiny("llama"))
    assert identify(adapted, known=off).namespace.root() == on.namespace.root() != off.namespace.root()


def test_two_adapters_and_their_names() -> None:
    adapted = lora(1)
    first = root(adapted)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=16)
    adapted.add_adapter("other", settings)
    _fill(adapted, 2, "other")
    assert root(adapted) == first  # one that does not act changes nothing
    adapted.set_adapter("other")
    assert root(adapted) == root(lora(2)) != first  # nor does its name
    adapted.base_model.set_adapter(["default", "other"])
    both = root(adapted)
    adapted.base_model.set_adapter(["other", "default"])
    assert len({first, both, root(adapted), root(lora(2))}) == 4  # sums in another order are other bits


def test_scaling_that_changes_in_place() -> None:
    adapted = lora(1)
    known = identify(adapted)
    for module in adapted.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(0.5)
    assert identify(adapted, known=known).namespace.root() != known.namespace.root()


def test_training_an_adapter_is_noticed() -> None:
    adapted = lora(1)
    known = identify(adapted)
    with torch.no_grad():
        next(weight for name, weight in adapted.named_parameters() if "lora_A" in name)[0, 0] += 1
    changed = identify(adapted, known=known)
    assert changed.namespace.root() != known.namespace.root()
    assert changed.namespace.weights == known.namespace.weights


def test_merged_weights_are_a_model_of_their_own() -> None:
    adapted = lora(1)
    on = identify(adapted)
    adapted.merge_adapter()
    merged = identify(adapted, known=on)
    plain_merged = lora(1).merge_and_unload()
    assert len({on.namespace.root(), merged.namespace.root(), root(tiny("llama"))}) == 3
    assert merged.namespace.root() == root(plain_merged)


def test_merging_what_hardly_shows_is_noticed() -> None:
    adapted = lora(1, r=1, target_modules=["q_proj"], layers_to_transform=[1])
    layer = adapted.get_base_model().model.layers[1].self_attn.q_proj
    with torch.no_grad():
        layer.lora_A["default"].weight.zero_()[0, 20] = 1
        layer.lora_B["default"].weight.zero_()[20] = 1
    on = identify(adapted)
    adapted.merge_adapter()  # one weight, written behind the version counter
    merged = identify(adapted, known=on)
    assert merged.namespace.weights != on.namespace.weights
    assert merged.namespace.root() == root(adapted)


def test_a_merged_adapter_that_is_off_has_no_name() -> None:
    # The next forward takes it out of the weights: what is computed is not what the weights say now.
    adapted = lora(1)
    adapted.merge_adapter()
    with adapted.disable_adapter(), pytest.raises(UnsupportedModelError, match="merged and disabled"):
        identify(adapted)


def test_adapters_that_transformers_itself_adds() -> None:
    model: Any = tiny("llama")
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=16))
    model.eval()
    _fill(model, 1)
    assert root(model) == root(lora(1))
    model.disable_adapters()
    assert root(model) == root(tiny("llama"))


def test_ia3() -> None:
    def ia3(seed: int) -> Any:
        made = peft.get_peft_model(
            tiny("llama"), peft.IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[])
        ).eval()
        _fill(made, seed)
        return made

    assert len({root(ia3(1)), root(ia3(2)), root(tiny("llama"))}) == 3
    adapted = ia3(1)
    with adapted.disable_adapter():
        assert root(adapted) == root(tiny("llama"))


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PROMPT_TUNING"),
        (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PREFIX_TUNING"),
        (peft.LoHaConfig(target_modules=["q_proj"]), "loha"),
        (peft.OFTConfig(target_modules=["q_proj"], oft_block_size=4), "oft"),
        (peft.VeraConfig(target_modules=["q_proj"]), "vera"),
        (
            peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[9]),
            "ALora",
        ),
        (peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[5, 6]), "TrainableTokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_adapters_are_refused_by_name(settings: Any, word: str, cache: KVCache) -> None:
    adapted = peft.get_peft_model(tiny("llama"), settings).eval()
    for refuses in (identify, lambda model: attach(model, cache), lambda model: Engine(model, cache)):
        with pytest.raises(UnsupportedModelError, match=word):
            refuses(adapted)


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
def test_prompt_tuning_of_a_model_that_is_attached(cache: KVCache) -> None:
    base, ids = tiny("llama"), torch.tensor([text(70)])
    attach(base, cache)
    base.generate(ids, max_new_tokens=4, do_sample=False)
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    tuned = peft.get_peft_model(base, settings).eval()
    other = peft.get_peft_model(tiny("llama"), settings).eval()
    other.load_state_dict(tuned.state_dict())
    wanted = other.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(tuned.generate(input_ids=ids, max_new_tokens=4, do_sample=False), wanted)


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"modules_to_save": ["embed_tokens"]}])
def test_adapters_answer_from_their_own_kv(settings: dict[str, Any], cache: KVCache) -> None:
    adapted, prompt = lora(1, **settings), text(70)
    base = adapted.get_base_model()
    engine = Engine(adapted, cache)
    with adapted.disable_adapter():
        off = plain(base, prompt, 8)[0]
        ask(engine, prompt, 1)
    on = plain(base, prompt, 8)[0]
    assert on != off
    for hit in (0, 69):
        asked = ask(engine, prompt, 8)
        assert (asked.usage.cached_tokens, asked.tokens) == (hit, on)
    with adapted.disable_adapter():
        asked = ask(engine, prompt, 8)
        assert (asked.usage.cached_tokens, asked.tokens) == (69, off)
    plain_engine = Engine(tiny("llama"), cache)
    assert ask(plain_engine, prompt, 8).usage.cached_tokens == 69


@pytest.mark.parametrize("inside", [False, True])
def test_generate_with_an_adapter_and_the_cache(inside: bool, cache: KVCache) -> None:
    adapted, ids = lora(1, task_type="CAUSAL_LM"), torch.tensor([text(70)])
    wanted = adapted.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    with adapted.disable_adapter():
        off = adapted.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    assert not torch.equal(wanted, off)
    attach(adapted.get_base_model() if inside else adapted, cache)
    for _ in range(2):
        assert torch.equal(adapted.generate(input_ids=ids, max_new_tokens=8, do_sample=False), wanted)
        with adapted.disable_adapter():
            assert torch.equal(adapted.generate(input_ids=ids, max_new_tokens=8, do_sample=False), off)
        cache.flush()
    assert {stored.entry.root for stored in cache.entries()} == {root(adapted), root(tiny("llama"))}


def test_an_adapter_for_one_call_goes_without_the_cache(cache: KVCache) -> None:
    adapted, ids = lora(1, task_type="CAUSAL_LM"), torch.tensor([text(70)])
    wanted = adapted.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    with adapted.disable_adapter():
        off = adapted.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    attach(adapted, cache)
    for _ in range(2):
        mixed = adapted.generate(input_ids=ids, max_new_tokens=8, do_sample=False, adapter_names=["__base__"])
        assert torch.equal(mixed, off)
        assert torch.equal(adapted.generate(input_ids=ids, max_new_tokens=8, do_sample=False), wanted)
        cache.flush()
    assert {stored.entry.root for stored in cache.entries()} == {root(adapted)}


# -- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_is_refused_by_name_and_nothing_is_stored(name: str, cache: KVCache) -> None:
    config, kind, settings, word = REFUSED[name]
    model = build(config, kind, settings)
    for refuses in (kv_spec, identify, lambda one: attach(one, cache), lambda one: Engine(one, cache)):
        with pytest.raises(UnsupportedModelError, match=word):
            refuses(model)
    assert "generate" not in vars(model)
    cache.flush()
    assert not list(cache.entries())


@pytest.mark.parametrize("kind", ["LlamaModel", "LlamaForSequenceClassification"])
def test_models_without_a_language_head_are_refused(kind: str, cache: KVCache) -> None:
    model = build("LlamaConfig", kind, {})
    for refuses in (identify, lambda one: attach(one, cache), lambda one: Engine(one, cache)):
        with pytest.raises(UnsupportedModelError, match=f"{kind} does not generate"):
            refuses(model)


def test_kv_that_depends_on_how_a_text_is_split_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = modeling_llama.apply_rotary_pos_emb

    def by_length(query: torch.Tensor, key: torch.Tensor, *others: Any) -> Any:
        return rotate(query, key * (1 + 0.01 * key.shape[2]), *others)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", by_length)
    with pytest.raises(UnsupportedModelError, match="layer 0 of llama computes other KV"):
        kv_spec(tiny("llama"))


class _Steered(LlamaForCausalLM):
    pass


def _hooked(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, args, output: output + 1)


def _pre_hooked(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def _patched(model: Any) -> None:
    norm = model.model.norm
    norm.forward = lambda states: states


def _training(model: Any) -> None:
    model.model.layers[0].train()


def _compiled(model: Any) -> None:
    model.model.layers[0].mlp.compile(backend="eager")


def _foreign(model: Any) -> None:
    class Norm(torch.nn.Identity):
        pass

    model.model.norm = Norm().eval()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (_hooked, "hook"), (_pre_hooked, "hook"), (_patched, "replaced"), (_training, "training"),
        (_compiled, "compiled"), (_foreign, "foreign"),
    ],
    ids=["hook", "pre-hook", "patched", "training", "compiled", "foreign"],
)  # fmt: skip
def test_a_model_whose_forward_is_not_what_it_is_named(
    change: Callable[[Any], None], word: str, cache: KVCache
) -> None:
    model, prompt = tiny("llama"), text(70)
    known = identify(model)
    engine = Engine(model, cache)
    ask(engine, prompt, 1)
    change(model)
    for settings in ({}, {"known": known}):
        with pytest.raises(UnsupportedModelError, match=word):
            identify(model, **settings)
    if word != "compiled":
        asked = ask(engine, prompt, 4)  # answers all the same, as the model now is
        assert (asked.usage.cached_tokens, asked.usage.ticket) == (0, None)
        if word != "training":
            assert asked.tokens == plain(model, prompt, 4)[0]


def test_code_that_is_not_of_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModelError, match="_Steered"):
        identify(_Steered(tiny("llama").config).eval())
    model = tiny("llama")
    known = identify(model)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, states: states)
    with pytest.raises(UnsupportedModelError, match="foreign"):
        identify(model, known=known)
    with pytest.raises(UnsupportedModelError, match="Linear is no transformers model"):
        identify(torch.nn.Linear(2, 2))


def _attention(*given: Any, **settings: Any) -> Any:
    return sdpa_attention_forward(*given, **settings)


def test_an_attention_of_the_users_own_is_refused() -> None:
    AttentionInterface.register("steered", _attention)
    model = tiny("llama")
    model.set_attn_implementation("steered")
    with pytest.raises(UnsupportedModelError, match="'steered'"):
        identify(model)


class _Packed(torch.nn.Parameter):
    pass


def test_weights_that_are_not_there_are_refused() -> None:
    model: Any = tiny("llama")
    model.model.layers[1].mlp.to("meta")
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.gate_proj\.weight is not in memory"):
        identify(model)
    model = tiny("llama")
    model.model.norm.weight = _Packed(model.model.norm.weight, requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"norm\.weight is a _Packed"):
        identify(model)


# -- what the spec says -----------------------------------------------------------------------------


def _pairs(rows: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return (rows[:, 0::2], rows[:, 1::2]) if interleaved else rows.tensor_split(2, -1)


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma3", "phi", "gpt-neox", "linear-rope", "smollm3", "cohere2"]
)
def test_the_rope_of_the_spec_turns_keys(name: str) -> None:
    # The keys of one token twice: equal before they are turned, so the second is the first turned once.
    model = tiny(name)
    with torch.no_grad():
        cache = model(torch.tensor([[7, 7]]), use_cache=True).past_key_values
    close = {"atol": 1e-5, "rtol": 1e-4}
    for group in kv_spec(model).groups:
        for layer in group.layers:
            first, second = cache.layers[layer].keys[0].double().unbind(1)
            size = group.rope.rotary_dim if group.rope is not None else 0
            torch.testing.assert_close(second[:, size:], first[:, size:], **close)
            if group.rope is None:
                continue
            angle = group.rope.theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
            angle /= float(group.rope.parameters.get("factor", 1.0))
            a, b = _pairs(first[:, :size], name == "cohere2")
            c, d = _pairs(second[:, :size], name == "cohere2")
            torch.testing.assert_close(c, a * angle.cos() - b * angle.sin(), **close)
            torch.testing.assert_close(d, b * angle.cos() + a * angle.sin(), **close)


def test_layers_without_rope_are_a_group_of_their_own() -> None:
    ropes = [(group.layers, group.rope is not None) for group in kv_spec(tiny("smollm3")).groups]
    assert ropes == [((0, 1), True), ((2,), False)]
    assert [group.rope for group in kv_spec(tiny("gpt2")).groups] == [None]
