"""Student's t distribution, for the intervals of forecasts and of comparisons."""


def student(probability: float, freedom: float) -> float:
    """A quantile of Student's t distribution. The degrees of freedom may be a fraction."""
    from scipy.special import stdtrit  # its import takes longer than most commands

    return float(stdtrit(freedom, probability))
