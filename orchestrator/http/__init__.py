"""The HTTP front door of an orchestrator: OpenAI's API over the same sessions, keys and limits as gRPC."""
