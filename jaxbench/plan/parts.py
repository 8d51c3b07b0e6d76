"""How long a planned step takes, and what takes it: one place, by which plans are ranked."""

from jaxbench.plan.plan import Plan


def seconds(plan: Plan) -> float:
    """The length of a step, by which plans are ranked and rows are compared."""
    return plan.bound_step_s


def tokens_per_s_per_gpu(plan: Plan) -> float:
    """Tokens per second of one GPU in such a step."""
    batch = plan.settings["batch"]
    return batch["sequence_length"] * batch["global_batch"] / plan.gpus / seconds(plan)


def parts(plan: Plan) -> dict[str, float]:
    """`seconds` by what takes them, those of collectives by the axes that they cross.

    `products` are those of the model, attention included. A pipeline's idle ranks compute on what
    they hold, so that `bubble` is its share of all products; `recompute` is the rest beyond the
    model's, padding included. Both take FLOPs of every dtype as equally long.
    """
    compute, idle = plan.bound_parts_s.compute, plan.stages.bubble if plan.stages else 0.0
    products = compute / max(1.0, plan.flops.recompute_ratio)
    bubble = min(compute * idle / (1 + idle), compute - products)
    found = {
        "products": products,
        "recompute": compute - products - bubble,
        "bubble": bubble,
        "other kernels": plan.bound_parts_s.memory,
    }
    for c in plan.collectives:
        name = f"exposed on {c.axes}"
        found[name] = found.get(name, 0.0) + c.exposed_s
    return found
