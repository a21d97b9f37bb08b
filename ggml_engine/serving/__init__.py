"""Many callers over one runner: named sessions, a shared prefix cache, a bounded queue. Tokens; no text, no HTTP."""
