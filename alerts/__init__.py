"""Quality drift and canary rollouts: evidence, verdicts, alerts, and the webhooks that carry them."""
