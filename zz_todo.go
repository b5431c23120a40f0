package copilot

import (
	"context"
	"encoding/json"
	"time"
)

func (s *Session) react(e *Event) {}

type (
	ToolCall struct {
		SessionID, ID, Name string
		Arguments           json.RawMessage
	}
	ToolResult  struct{ Text string }
	ToolHandler func(ctx context.Context, call ToolCall) (ToolResult, error)

	PermissionRequest  struct{}
	PermissionDecision struct{}
	PermissionHandler  func(ctx context.Context, r PermissionRequest) (PermissionDecision, error)

	UserInputRequest       struct{ Question string }
	UserInputResponse      struct{ Answer string }
	ElicitationRequest     struct{}
	ElicitationResult      struct{}
	ExitPlanModeRequest    struct{}
	ExitPlanModeResult     struct{}
	AutoModeSwitchRequest  struct{}
	AutoModeSwitchResponse string
	MCPAuthRequest         struct{}
	HookCall               struct {
		Type  string
		Input json.RawMessage
	}
	Hooks struct {
		PreToolUse func(ctx context.Context) error
	}
	CommandCall struct{}
)

type MCPAuthToken struct {
	AccessToken string        `json:"accessToken,required,secret"`
	TokenType   string        `json:"tokenType,omitempty"`
	ExpiresIn   time.Duration `json:"-"`
}
