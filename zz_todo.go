package copilot

type SessionFSConfig struct{}
type GitHubTelemetry struct{}
