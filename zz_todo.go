package copilot

type SessionFSConfig struct{}
type GitHubTelemetry struct{}
type Model struct{}
type Capabilities struct{}

func (c *Capabilities) merge(o Capabilities)    {}
func (s *Session) putCanvasLocked(o OpenCanvas) {}
func (s *Session) dropCanvasLocked(id string)   {}
