"""Named sessions, anonymous requests and a shared prefix cache over one runner."""
