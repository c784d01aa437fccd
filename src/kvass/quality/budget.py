"""What an approximation may cost, and what the gate says of one."""

from typing import Final, NamedTuple, Self

from kvass.config import Settings


class Budget(NamedTuple):
    """What an approximation may cost: mean KL per token in nats, also where a prompt leaves a stored text
    early, and the upper bound of facts lost."""

    kl: float = 0.01
    facts_lost: float = 0.025

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """What the operator allows."""
        return cls(settings.lossy_max_kl, settings.lossy_max_facts_lost)


DEFAULT_BUDGET: Final = Budget()


class Verdict(NamedTuple):
    """Whether an approximation may be used, and why, for people; `kind` is the reason in a word or two."""

    allowed: bool
    reason: str
    kind: str = "allowed"


def judged(what: str, model: str, kl: float, facts_lost: float, budget: Budget, where: str = "") -> Verdict:
    """Whether what costs a model so much is within a budget. What is no number is over every budget."""
    if not kl <= budget.kl:
        reason = f"{what} costs {model} a KL of {kl:.4g} a token{where}, over the {budget.kl:g}"
        return Verdict(False, f"{reason} that lossy_max_kl or the request allows", "kl")
    if not facts_lost <= budget.facts_lost:
        reason = f"{what} may lose {model} {facts_lost:.2%} of facts, over the {budget.facts_lost:.2%}"
        return Verdict(False, f"{reason} that lossy_max_facts_lost or the request allows", "facts")
    return Verdict(True, f"certified: KL {kl:.4g}, facts lost at most {facts_lost:.2%}")
