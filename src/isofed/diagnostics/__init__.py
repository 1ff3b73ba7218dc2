"""What a run costs, and (to come) what heterogeneity does to a model."""
