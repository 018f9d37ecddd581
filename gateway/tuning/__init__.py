"""Choosing a policy: calibration with a guarantee, evaluation, learned routers, exports."""
