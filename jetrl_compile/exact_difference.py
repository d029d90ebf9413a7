"""What keeps an operator of two graphs from giving a token the same bits."""

from jetrl_compile.differences import Difference, remedy
from jetrl_compile.kernel_claims import claim_of, has_bits, kernel_name
from jetrl_compile.precision_graph import Operator


def exact_difference(rollout: Operator, train: Operator) -> Difference | None:
    """Return the difference that exact containment finds in an operator, or None.

    Args:
        rollout: Of the rollout graph.
        train: Its counterpart.
    """
    if not has_bits(rollout):
        return None
    claims = claim_of(rollout), claim_of(train)
    names = kernel_name(rollout), kernel_name(train)
    if claims[0] is not None and claims[1] is not None:
        if claims[0].numerics == claims[1].numerics:
            return None
        attribute, what = "provider", f"{names[0]} in rollout, {names[1]} in train"
        message = f"{rollout.name}: kernel is {what}, whose results differ in bits"
    else:
        attribute = "batch_invariant"
        sides = [
            f"{name} in {side}"
            for name, side, claim in zip(
                names, ("rollout", "train"), claims, strict=True
            )
            if claim is None
        ]
        message = (
            f"{rollout.name}: no test shows that the kernel ({', '.join(sides)}) gives "
            "a row the same bits in every batch"
        )
    message += f"; {remedy(attribute)}"
    return Difference(2, rollout.name, attribute, *names, message)
