"""Jobs on Google Kubernetes Engine: each a JobSet, with its config in a ConfigMap that goes when the JobSet goes.

What a pod runs needs neither Hydra nor the Kubernetes API. Nothing here is imported unless hydra/launcher=gke is.
"""
