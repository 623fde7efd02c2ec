"""The main job on one machine: ``python -m stages.demo``, which is what ``make demo`` runs."""
