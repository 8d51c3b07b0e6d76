"""Model architectures. The family files are data and import no JAX; `MODELS` is their registry."""

from jaxbench.models import grok, llama, nemotron

MODELS = {
    f"{cfg.family.replace('.', '')}_{cfg.size}": cfg
    for cfg in (*llama.MODELS, *grok.MODELS, *nemotron.MODELS)
}
