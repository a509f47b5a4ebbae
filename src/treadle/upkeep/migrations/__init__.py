"""Schema Versioning: whole collections are migrated in the background."""
