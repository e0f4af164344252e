"""Plans, schedules and groups: how a recipe decides which copies a layer makes and multiplies."""
