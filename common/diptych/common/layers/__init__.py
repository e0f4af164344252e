"""What a recipe means for a layer: its plan, its schedule, its groups."""
