"""Files and batches of requests: OpenAI's Batch API, and `octavo batch run`."""
