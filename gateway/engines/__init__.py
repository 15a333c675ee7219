"""One small pure file per engine: what to ask, and bytes in, EngineReport out."""
