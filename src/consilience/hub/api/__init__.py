"""The hub over HTTP. Only here is code asynchronous; everything else runs in worker threads."""
