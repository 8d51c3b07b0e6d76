"""How long a planned step takes, and what takes it: one place, by which plans are ranked."""

from jaxbench.plan.plan import Plan


def seconds(plan: Plan) -> float:
    """The length of a step, by which plans are ranked and rows are compared: the forecast's."""
    return plan.forecast_step_s


def tokens_per_s_per_gpu(plan: Plan) -> float:
    """Tokens per second of one GPU in such a step."""
    return plan.rates["forecast"].tokens_per_s_per_gpu


def parts(plan: Plan) -> dict[str, float]:
    """`seconds` by what takes them, as the forecast has it, but for products: those of the model,
    `recompute`, and of a pipeline the `bubble`.

    Idle ranks compute on what they hold, so that the bubble is its share of all products; recompute
    is the rest beyond the model's, padding included. FLOPs of every dtype count as equally long.
    """
    found = dict(plan.forecast.parts_s)
    all_products, idle = found.pop("products", 0.0), plan.stages.bubble if plan.stages else 0.0
    products = all_products / max(1.0, plan.flops.recompute_ratio)
    bubble = min(all_products * idle / (1 + idle), all_products - products)
    recompute = all_products - products - bubble
    return {"products": products, "recompute": recompute, "bubble": bubble, **found}
