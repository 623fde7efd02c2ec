"""How each part of a node is read when somebody scrapes its metrics: looks only, and keeps nothing."""
