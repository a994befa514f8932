"""The alpha-beta model of a step: predicted, measured, and compared."""
