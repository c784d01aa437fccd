"""The model runner: its forwards over given KV are the model's own."""

import numpy as np
import pytest
import torch
from drawing import tokens

from kvass.engines.transformers.load import LoadedModel
from kvass.engines.transformers.runner import TransformersRunner
from kvass.errors import InputError, UnsupportedModelError
from kvass.runner import Branch


def test_a_continuation_over_unrounded_kv_is_the_whole_forward(tiny: LoadedModel) -> None:
    runner = TransformersRunner(tiny, "float32")
    sequence = tokens(1, 640)  # more than a slice, and than the window
    kv = runner.prefill(sequence[:600])
    found = runner.continue_over(kv, sequence[600:])
    with torch.no_grad():
        logits = tiny.model(input_ids=torch.tensor([sequence])).logits[0, 600:]
    np.testing.assert_allclose(found, torch.log_softmax(logits, -1).numpy(), atol=2e-4)


def test_kv_is_of_all_tokens_in_the_dtype_that_is_stored(runner: TransformersRunner) -> None:
    kv = runner.prefill(tokens(2, 600))
    for group, arrays in zip(runner.spec.groups, kv, strict=True):
        for name in ("k", "v"):
            assert arrays[name].shape == group.shape(name, 600)
            assert arrays[name].dtype == "bfloat16"
            assert np.isfinite(arrays[name].astype(np.float32)).all()


def test_the_same_kv_gives_the_same_bits_whatever_ran_between(runner: TransformersRunner) -> None:
    kv, other = runner.prefill(tokens(3, 100)), runner.prefill(tokens(4, 900))
    first = runner.continue_over(kv, tokens(5, 20))
    changed = runner.continue_over(other, tokens(5, 20))
    again = runner.continue_over(kv, tokens(5, 20))
    assert (first == again).all()
    assert (first != changed).any()


def test_branches_do_not_see_each_other(runner: TransformersRunner) -> None:
    """Each chooses what it chooses alone; a mask that leaks, or positions that run on, would show."""
    kv = runner.prefill(tokens(6, 300))
    branches = [Branch(tokens(seed, 3 + seed % 9), tokens(seed + 100, 1 + seed % 5)) for seed in range(20)]
    together = runner.choose_over(kv, branches)
    for branch, chosen in zip(branches, together, strict=True):
        alone = runner.continue_over(kv, [*branch.prompt, *branch.answer[:-1]])
        assert chosen.tolist() == alone[len(branch.prompt) - 1 :].argmax(1).tolist()


def test_branches_depend_on_kv_within_the_window_alone(runner: TransformersRunner) -> None:
    """Rows before the window of a sliding group may hold anything."""
    kv = [{name: array.copy() for name, array in arrays.items()} for arrays in runner.prefill(tokens(7, 300))]
    branches = [Branch(tokens(8, 4), tokens(9, 2))]
    before = runner.choose_over(kv, branches)[0].tolist(), runner.continue_over(kv, tokens(8, 4))
    for group, arrays in zip(runner.spec.groups, kv, strict=True):
        for array in arrays.values():
            array[:, : group.first_needed(300)] = np.nan
    assert runner.choose_over(kv, branches)[0].tolist() == before[0]
    assert (runner.continue_over(kv, tokens(8, 4)) == before[1]).all()


def test_what_does_not_fit_is_refused(runner: TransformersRunner) -> None:
    kv = runner.prefill(tokens(10, 30))
    with pytest.raises(InputError, match="flat sequence"):
        runner.prefill([])
    with pytest.raises(InputError, match="flat sequence"):
        runner.continue_over(kv, [100_000])
    with pytest.raises(InputError, match="more than the 1024"):
        runner.prefill(tokens(11, 1025))
    with pytest.raises(InputError, match="layer groups"):
        runner.continue_over([], [1])
    with pytest.raises(InputError, match="array 'k' is float32"):
        runner.continue_over(
            [{name: array.astype(np.float32) for name, array in arrays.items()} for arrays in kv], [1]
        )
    with pytest.raises(InputError, match="prompt and an answer"):
        runner.choose_over(kv, [Branch([], [1])])


def test_a_model_in_another_dtype_is_refused(smollm2_bf16: LoadedModel) -> None:
    with pytest.raises(UnsupportedModelError, match="load the model so"):
        TransformersRunner(smollm2_bf16)
