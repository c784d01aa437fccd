"""What reuse, edit and calibration need of a model: a contract, without an engine."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvass.container import Array
from kvass.spec import KVSpec

KV = Sequence[Mapping[str, Array]]
"""A sequence's KV: for each layer group of the spec the canonical arrays `k` (after RoPE)
`[layers, tokens, kv_heads, head_dim]` and `v` `[layers, tokens, kv_heads, v_head_dim]`, in its dtype."""


Positions = Sequence[int] | npt.NDArray[np.int64]
"""Places of tokens in a prompt."""


Wait = Callable[[int, Sequence[str]], None]
"""Called with a layer of the model and names of its arrays (`k`, `v`): returns once they are in place."""


class Branch(NamedTuple):
    """One way to go on after a sequence: tokens that are given, then tokens that are judged."""

    prompt: Sequence[int]
    answer: Sequence[int]


class Workspace(Protocol):
    """KV of one prompt, being put together: written by whoever loads it, and by the model row by row."""

    @property
    def spec(self) -> KVSpec:
        """What the KV looks like, in the dtype that it is computed in."""

    def arrays(self, group: int, start: int, stop: int) -> Mapping[str, Array]:
        """Views of `k` (after RoPE) and `v` of tokens `start` to `stop`, `[layers, tokens, heads, dim]`; from
        now on these tokens are taken to be in place, or on their way (`arriving`). Raises InputError beyond
        the capacity.
        """

    def layer(self, number: int) -> Mapping[str, Array]:
        """`k` and `v` of one of the model's layers, `[capacity, heads, dim]`, to be read."""

    def arriving(self, wait: Wait | None) -> None:
        """From now on tokens are in place only once `wait` returns, which is called before a layer's arrays
        are used, and may raise; with None, all are."""

    def recompute(
        self, tokens: Sequence[int], positions: Positions, *, layers: int | None = None, judged: int = 1
    ) -> npt.NDArray[np.float32]:
        """Compute the KV of these tokens anew at their positions, which rise, upon all that stands before
        each of them in the workspace, other rows of the same call being as computed, later tokens unseen.

        Returns log-probabilities `[judged, vocabulary]` of the token after each of the last rows. With
        `layers`, only so many of the model's first layers, and the KV of the one above, are computed, and no
        rows come back. Raises InputError for rows that do not fit, or would see what was never put there.
        """

    def attention(
        self,
        tokens: Sequence[int],
        positions: Positions,
        *,
        layers: Sequence[int] | None = None,
        judged: int = 1,
        exact: int | None = None,
    ) -> npt.NDArray[np.float32]:
        """As `recompute`, but up to the last of these `layers` (all) only; returns the attention that all
        tokens up to the last row get in them, a mean over the last `judged` rows,
        `[layers, query heads, tokens]`.

        With `exact`, the rows are computed as if nothing stood between the prompt's first `exact` tokens and
        them, and only then asked for their attention to all: of what arrives, they need no more than `k` of
        `layers`. They must not be among it.
        """


class ModelRunner(Protocol):
    """One model, run over KV that the caller holds.

    It computes in float32 over KV in the dtypes of `spec`: between two runs over the same KV nothing
    differs, so that what two of them differ by is what was done to the KV.
    """

    @property
    def name(self) -> str:
        """The model's name, for people."""

    @property
    def spec(self) -> KVSpec:
        """What the KV looks like; with the RoPE of each group."""

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """The tokens of a text; with `begin`, of one that begins a sequence (after BOS, if there is one)."""

    def prefill(self, tokens: Sequence[int]) -> KV:
        """The KV of a whole sequence, in new arrays; of groups with a window too, all tokens are kept.

        Raises InputError for an empty sequence, or one that the model does not take.
        """

    def continue_over(self, kv: KV, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Log-probabilities `[n, vocabulary]` of the token after each of `n` tokens that follow on `kv`.

        Raises InputError for KV that does not fit the spec, and as `prefill`.
        """

    def choose_over(self, kv: KV, branches: Sequence[Branch]) -> list[npt.NDArray[np.int64]]:
        """For each branch over `kv`, the likeliest token at the place of each of its answer's, given what
        stands before it, `[len(answer)]`: greedy decoding gives the answer if, and only if, all are equal.

        No branch sees another. Raises as `continue_over`, and for a branch without a prompt.
        """

    def workspace(self, capacity: int) -> Workspace:
        """Room for the KV of a prompt of so many tokens, in float32; it may be that of the call before.

        Raises InputError for more than the model takes, UnsupportedModelError for a model whose KV cannot be
        moved or computed in part.
        """
