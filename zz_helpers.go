package copilot

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// ======== copilot.go: the typed RPC helpers ========

// ask makes a call whose result is a T. An absent, null or empty result is the zero T.
func ask[T any](ctx context.Context, call func(ctx context.Context, method string, params, result any) error, method string, params any) (T, error) {
	var result, none T
	if err := call(ctx, method, params, &result); err != nil {
		return none, err
	}
	return result, nil
}

// outcome is a result that may say, in its body, that nothing was done.
type outcome struct {
	Success *bool  `json:"success"`
	Error   string `json:"error"`
}

func (o outcome) refusal(c *Client, method, sessionID string) error {
	if o.Success == nil || *o.Success {
		return nil
	}
	return c.refused(method, o.Error, sessionID)
}

// idParams are the params of the client's calls about one session.
type idParams struct {
	SessionID string `json:"sessionId"`
}

// onSession makes a call about the session with this id, which need not be open here.
func onSession[T any](ctx context.Context, c *Client, method, id string) (T, error) {
	r, err := ask[T](ctx, c.Call, method, idParams{id})
	if err != nil {
		err = &SessionError{SessionID: id, Err: err}
	}
	return r, err
}

// PingResult is the server's answer to a ping.
type PingResult struct {
	Message         string    `json:"message"`
	Timestamp       time.Time `json:"timestamp"` // the server's clock
	ProtocolVersion int       `json:"protocolVersion"`
}

// Ping asks the server for a sign of life. The answer quotes message.
//
// Experimental: the server's schema marks it so.
func (c *Client) Ping(ctx context.Context, message string) (PingResult, error) {
	return ask[PingResult](ctx, c.Call, "ping", struct {
		Message string `json:"message,omitempty"`
	}{message})
}

// Status is what the server runs.
type Status struct {
	Version         string `json:"version"` // of the CLI
	ProtocolVersion int    `json:"protocolVersion"`
}

// Status returns the versions of the CLI and of its protocol.
func (c *Client) Status(ctx context.Context) (Status, error) {
	return ask[Status](ctx, c.Call, "status.get", nil)
}

// AuthStatus says who is logged in.
type AuthStatus struct {
	IsAuthenticated bool   `json:"isAuthenticated"`
	AuthType        string `json:"authType"` // user, env, gh-cli, hmac, api-key, token
	Host            string `json:"host"`
	Login           string `json:"login"`
	StatusMessage   string `json:"statusMessage"` // for people
}

// Err returns nil when the CLI is logged in, else an error that matches ErrAuthentication and carries the server's words.
func (a AuthStatus) Err() error {
	if a.IsAuthenticated {
		return nil
	}
	return fmt.Errorf("%w: %s", ErrAuthentication, cmp.Or(a.StatusMessage, "nobody is logged in"))
}

// AuthStatus returns whether the CLI is logged in, and how.
func (c *Client) AuthStatus(ctx context.Context) (AuthStatus, error) {
	return ask[AuthStatus](ctx, c.Call, "auth.getStatus", nil)
}

// Model is a language model that sessions can use.
type Model struct {
	ID                        string            `json:"id"`
	Name                      string            `json:"name"`
	Capabilities              ModelCapabilities `json:"capabilities"`
	Policy                    *ModelPolicy      `json:"policy,omitempty"`
	Billing                   *ModelBilling     `json:"billing,omitempty"`
	SupportedReasoningEfforts []string          `json:"supportedReasoningEfforts,omitempty"`
	DefaultReasoningEffort    string            `json:"defaultReasoningEffort,omitempty"`
	SupportedContextTiers     []string          `json:"supportedContextTiers,omitempty"`
	ModelPickerCategory       string            `json:"modelPickerCategory,omitempty"`      // lightweight, versatile, powerful
	ModelPickerPriceCategory  string            `json:"modelPickerPriceCategory,omitempty"` // low, medium, high, very_high
	Metadata                  json.RawMessage   `json:"metadata,omitempty"`
	WarningText               json.RawMessage   `json:"warningText,omitempty"`
	InfoMessages              []ModelMessage    `json:"infoMessages,omitempty"`
	WarningMessages           []ModelMessage    `json:"warningMessages,omitempty"`
	Provider                  *ModelProvider    `json:"provider,omitempty"`
}

// ModelPolicy is what the user's organisation says about a model.
type ModelPolicy struct {
	State string `json:"state"` // enabled, disabled, unconfigured
	Terms string `json:"terms,omitempty"`
}

// ModelBilling is what a model costs.
type ModelBilling struct {
	Multiplier      float64         `json:"multiplier,omitempty"` // premium requests for each request
	TokenPrices     json.RawMessage `json:"tokenPrices,omitempty"`
	DiscountPercent int             `json:"discountPercent,omitempty"`
	Promo           json.RawMessage `json:"promo,omitempty"`
}

// ModelMessage is a notice about a model, for people.
type ModelMessage struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// ModelProvider says where a model comes from.
type ModelProvider struct {
	ID    string `json:"id"`
	Label string `json:"label"`
	Kind  string `json:"kind"`
}

// models is a client's list of models.
type models struct {
	mu   sync.Mutex
	list json.RawMessage // as JSON, of which every caller decodes a copy of its own; nil before the first success
	load *modelLoad      // in flight
}

type modelLoad struct {
	waiting int // guarded by models.mu
	cancel  context.CancelFunc
	done    chan struct{}
	list    json.RawMessage // valid after done, like err
	err     error
}

// Models returns the models that the user may choose from, or what Options.ListModels returns. The first success is kept for the life of the
// client; errors are not. Concurrent calls share one request, which lasts as long as any of them waits for it. The list belongs to
// the caller; Capabilities.Supports and Capabilities.Limits in it are never nil. Errors match ErrAuthentication when nobody is logged in.
//
// Experimental: the server's schema marks it so.
func (c *Client) Models(ctx context.Context) ([]Model, error) {
	list, err := c.modelList(ctx)
	if err != nil {
		return nil, err
	}
	return decodeModels(list)
}

func decodeModels(list json.RawMessage) ([]Model, error) {
	var found []Model
	if err := decodeResult("models.list", list, &found); err != nil {
		return nil, err
	}
	for i := range found {
		capabilities := &found[i].Capabilities
		capabilities.Supports = or(capabilities.Supports, ModelSupports{})
		capabilities.Limits = or(capabilities.Limits, ModelLimits{})
	}
	return found, nil
}

func (c *Client) modelList(ctx context.Context) (json.RawMessage, error) {
	if ctx.Err() != nil {
		return nil, contextError(ctx)
	}
	if err := c.conn.failure(); err != nil {
		return nil, err
	}
	m := &c.models
	m.mu.Lock()
	if m.list != nil {
		defer m.mu.Unlock()
		return m.list, nil
	}
	load := m.load
	if load == nil {
		load = &modelLoad{done: make(chan struct{})}
		var loading context.Context
		loading, load.cancel = context.WithCancel(c.ctx)
		m.load = load
		go c.loadModels(loading, load) // owned by the client; ends with the answer, with its last caller or with the client
	}
	load.waiting++
	m.mu.Unlock()
	select {
	case <-load.done:
	case <-ctx.Done():
		m.leave(load)
		return nil, contextError(ctx)
	case <-c.ctx.Done(): // a ListModels that does not return is left to itself
	}
	if c.ctx.Err() != nil {
		return nil, context.Cause(c.ctx)
	}
	return load.list, load.err
}

// leave gives up waiting for a load; the last one ends it.
func (m *models) leave(load *modelLoad) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if load.waiting--; load.waiting == 0 {
		load.cancel()
		if m.load == load {
			m.load = nil
		}
	}
}

func (c *Client) loadModels(ctx context.Context, load *modelLoad) {
	defer load.cancel()
	protect(c, func() (json.RawMessage, error) { return c.fetchModels(ctx) }, func(list json.RawMessage, err error) {
		c.models.mu.Lock()
		defer c.models.mu.Unlock()
		load.list, load.err = list, err
		if c.models.load == load {
			c.models.list, c.models.load = list, nil
		}
		close(load.done)
	})
}

func (c *Client) fetchModels(ctx context.Context) (list json.RawMessage, err error) {
	if c.opts.ListModels != nil {
		found, err := c.opts.ListModels(ctx)
		if err == nil {
			list, err = marshal(found)
		}
		if err != nil {
			return nil, fmt.Errorf("copilot: ListModels: %w", err)
		}
		return list, nil
	}
	result, err := ask[struct {
		Models json.RawMessage `json:"models"`
	}](ctx, c.Call, "models.list", nil)
	if err != nil {
		return nil, err
	}
	if _, err := decodeModels(result.Models); err != nil {
		return nil, err
	}
	return append(json.RawMessage{}, result.Models...), nil
}

// Quota is what is left of the user's quotas.
type Quota struct {
	QuotaSnapshots map[string]QuotaSnapshot `json:"quotaSnapshots"` // by kind: chat, completions, premium_interactions, ...
}

// Quota returns what is left of the user's quotas. Errors match ErrAuthentication when nobody is logged in.
//
// Experimental: the server's schema marks it so.
func (c *Client) Quota(ctx context.Context) (Quota, error) {
	return ask[Quota](ctx, c.Call, "account.getQuota", nil)
}

// SessionFilter selects sessions by their working directory. Each member that is set must match exactly.
type SessionFilter struct {
	CWD        string `json:"cwd,omitempty"`
	GitRoot    string `json:"gitRoot,omitempty"`
	Repository string `json:"repository,omitempty"` // owner/name
	Branch     string `json:"branch,omitempty"`
}

// SessionInfo describes a stored session.
type SessionInfo struct {
	SessionID    string                   `json:"sessionId"`
	StartTime    time.Time                `json:"startTime"`
	ModifiedTime time.Time                `json:"modifiedTime"`
	Summary      string                   `json:"summary"`
	Name         string                   `json:"name"`
	ClientName   string                   `json:"clientName"` // of the client that used it last
	IsRemote     bool                     `json:"isRemote"`
	IsDetached   bool                     `json:"isDetached"` // for maintenance, not for people
	Context      *WorkingDirectoryContext `json:"context"`

	// Of remote sessions only.
	Repository        *RemoteRepository `json:"repository"`
	RemoteSessionIDs  []string          `json:"remoteSessionIds"` // newest first
	PullRequestNumber int               `json:"pullRequestNumber"`
	ResourceID        string            `json:"resourceId"`
	TaskType          string            `json:"taskType"` // cca, cli
	State             string            `json:"state"`
}

// Sessions lists the stored sessions that filter selects, all for nil. A session is stored from its first message on.
func (c *Client) Sessions(ctx context.Context, filter *SessionFilter) ([]SessionInfo, error) {
	r, err := ask[struct {
		Sessions []SessionInfo `json:"sessions"`
	}](ctx, c.Call, "session.list", struct {
		Filter *SessionFilter `json:"filter,omitempty"`
	}{filter})
	return r.Sessions, err
}

// SessionInfo describes the stored session with this id; it returns nil, nil when there is none.
func (c *Client) SessionInfo(ctx context.Context, id string) (*SessionInfo, error) {
	r, err := onSession[struct {
		Session *SessionInfo `json:"session"`
	}](ctx, c, "session.getMetadata", id)
	return r.Session, err
}

// LastSessionID returns the id of the stored session that was changed last, "" when there is none.
func (c *Client) LastSessionID(ctx context.Context) (string, error) {
	r, err := ask[idParams](ctx, c.Call, "session.getLastId", nil)
	return r.SessionID, err
}

// ForegroundSessionID returns the id of the session that the CLI's terminal interface shows, "" when it shows none or has no such interface.
func (c *Client) ForegroundSessionID(ctx context.Context) (string, error) {
	r, err := ask[idParams](ctx, c.Call, "session.getForeground", nil)
	return r.SessionID, err
}

// SetForegroundSessionID makes the CLI's terminal interface show a session. A CLI without one refuses, with an [*RPCError].
func (c *Client) SetForegroundSessionID(ctx context.Context, id string) error {
	return c.ensure(ctx, "session.setForeground", id)
}

// DeleteSession deletes a session and its files. One that is open here ends with ErrSessionNotFound. Where there is none, the
// error matches ErrSessionNotFound.
func (c *Client) DeleteSession(ctx context.Context, id string) error {
	c.mu.Lock()
	s := c.routes[id].session
	if s != nil && s.phase == starting {
		s = nil // it is about to exist again
	}
	c.mu.Unlock()
	err := c.ensure(ctx, "session.delete", id)
	if err == nil && s != nil {
		s.end(s.errorFor(ErrSessionNotFound))
	}
	return err
}

// ensure makes a call about a session whose result says whether it was done.
func (c *Client) ensure(ctx context.Context, method, id string) error {
	r, err := onSession[outcome](ctx, c, method, id)
	if err != nil {
		return err
	}
	return r.refusal(c, method, id)
}

// ForkSession copies a stored session, up to and without the event beforeEventID, whole when that is "". It returns the id of the copy, which
// can be resumed.
//
// Experimental: the server's schema marks it so.
func (c *Client) ForkSession(ctx context.Context, id, beforeEventID string) (string, error) {
	r, err := ask[idParams](ctx, c.Call, "sessions.fork", struct {
		SessionID string `json:"sessionId"`
		ToEventID string `json:"toEventId,omitempty"`
	}{id, beforeEventID})
	if err != nil {
		err = &SessionError{SessionID: id, Err: err}
	}
	return r.SessionID, err
}

// TelemetryEvent is an event of the host's for the CLI's telemetry.
type TelemetryEvent struct {
	Kind       string             `json:"kind"`
	Properties map[string]string  `json:"properties,omitempty"`
	Metrics    map[string]float64 `json:"metrics,omitempty"`
	ClientName string             `json:"clientName,omitempty"` // of the host, for [Client.SendTelemetry] only; "" means sdk
}

// SendTelemetry hands the CLI an event that belongs to no session.
//
// Experimental: no schema of the server's has it.
func (c *Client) SendTelemetry(ctx context.Context, t TelemetryEvent) error {
	if t.ClientName == "" {
		t.ClientName = "sdk"
	}
	return c.Call(ctx, "sendTelemetry", t, nil)
}

// SendTelemetry hands the CLI an event of this session.
//
// Experimental: no schema of the server's has it.
func (s *Session) SendTelemetry(ctx context.Context, t TelemetryEvent) error {
	t.ClientName = ""
	return s.Call(ctx, "session.sendTelemetry", t, nil)
}

// Capabilities is what the clients of a session can do for it.
type Capabilities struct {
	UI         UICapabilities `json:"ui"`
	Extensions bool           `json:"extensions"`
}

// UICapabilities is what the user interfaces of a session's clients can show.
type UICapabilities struct {
	Elicitation bool `json:"elicitation"` // forms: [Session.UI] works
	MCPApps     bool `json:"mcpApps"`
	Canvases    bool `json:"canvases"`
}

// merge changes what raw names and leaves the rest, as well as what does not fit.
func (c *Capabilities) merge(raw json.RawMessage) { _ = json.Unmarshal(raw, c) }

// Capabilities returns what the session's clients can do at present.
func (s *Session) Capabilities() Capabilities {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.capabilities
}

// OpenCanvases returns the canvases that are open at present, in the order in which they were opened. The list belongs to the caller.
func (s *Session) OpenCanvases() []OpenCanvas {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := slices.Clone(s.canvases)
	for i := range list {
		list[i].Input = bytes.Clone(list[i].Input)
	}
	return list
}

func (s *Session) putCanvasLocked(canvas OpenCanvas) {
	switch i := s.canvasLocked(canvas.InstanceID); {
	case canvas.InstanceID == "":
	case i >= 0:
		s.canvases[i] = canvas
	default:
		s.canvases = append(s.canvases, canvas)
	}
}

func (s *Session) dropCanvasLocked(id string) {
	if i := s.canvasLocked(id); i >= 0 {
		s.canvases = slices.Delete(s.canvases, i, i+1)
	}
}

func (s *Session) canvasLocked(id string) int {
	return slices.IndexFunc(s.canvases, func(c OpenCanvas) bool { return c.InstanceID == id })
}

// CurrentModel is the model that a session uses.
type CurrentModel struct {
	ModelID         string `json:"modelId"`
	ReasoningEffort string `json:"reasoningEffort"`
	ContextTier     string `json:"contextTier"` // default, long_context
	AutoTier        string `json:"autoTier"`    // efficiency, balance, intelligence, fast
}

// Model returns the model that the session uses.
//
// Experimental: the server's schema marks it so.
func (s *Session) Model(ctx context.Context) (CurrentModel, error) {
	return ask[CurrentModel](ctx, s.Call, "session.model.getCurrent", nil)
}

// ModelOptions tunes a change of model. Members that are not set keep what the session has.
type ModelOptions struct {
	ReasoningEffort      string             `json:"reasoningEffort,omitempty"`
	ResetReasoningEffort bool               `json:"-"`                          // go back to the model's default
	ReasoningSummary     string             `json:"reasoningSummary,omitempty"` // none, concise, detailed
	ContextTier          string             `json:"contextTier,omitempty"`      // default, long_context
	AutoTier             string             `json:"autoTier,omitempty"`         // efficiency, balance, intelligence, fast; with model auto only
	ModelCapabilities    *ModelCapabilities `json:"modelCapabilities,omitempty"`
}

// SetModel changes the session's model, at once or, while a turn runs, after that; the event session.model_change tells when.
//
// Experimental: the server's schema marks it so.
func (s *Session) SetModel(ctx context.Context, model string, o *ModelOptions) error {
	o = or(o, ModelOptions{})
	params := struct {
		ModelID         string          `json:"modelId"`
		ReasoningEffort json.RawMessage `json:"reasoningEffort,omitempty"` // hides that of the options
		*ModelOptions
	}{ModelID: model, ModelOptions: o}
	switch {
	case o.ResetReasoningEffort && o.ReasoningEffort != "":
		return s.errorFor(fmt.Errorf("%w: ModelOptions: ReasoningEffort with ResetReasoningEffort", ErrInvalidConfig))
	case o.ResetReasoningEffort:
		params.ReasoningEffort = json.RawMessage("null")
	case o.ReasoningEffort != "":
		params.ReasoningEffort = appendQuoted(nil, o.ReasoningEffort)
	}
	return s.Call(ctx, "session.model.switchTo", params, nil)
}

// Mode returns how far the agent goes by itself.
//
// Experimental: the server's schema marks it so.
func (s *Session) Mode(ctx context.Context) (AgentMode, error) {
	raw, err := ask[json.RawMessage](ctx, s.Call, "session.mode.get", nil)
	if err != nil || len(raw) == 0 || raw[0] == '{' { // an empty result
		return "", err
	}
	var mode AgentMode
	if err := decodeResult("session.mode.get", raw, &mode); err != nil {
		return "", s.errorFor(err)
	}
	return mode, nil
}

// SetMode changes how far the agent goes by itself: AgentModeInteractive, AgentModePlan or AgentModeAutopilot.
//
// Experimental: the server's schema marks it so.
func (s *Session) SetMode(ctx context.Context, mode AgentMode) error {
	return s.Call(ctx, "session.mode.set", map[string]AgentMode{"mode": mode}, nil)
}

// Name returns the session's name, "" when it has none.
//
// Experimental: the server's schema marks it so.
func (s *Session) Name(ctx context.Context) (string, error) {
	r, err := ask[struct {
		Name string `json:"name"`
	}](ctx, s.Call, "session.name.get", nil)
	return r.Name, err
}

// SetName names the session. The server refuses an empty name.
//
// Experimental: the server's schema marks it so.
func (s *Session) SetName(ctx context.Context, name string) error {
	return s.Call(ctx, "session.name.set", map[string]string{"name": name}, nil)
}

// Plan is a session's plan.
type Plan struct {
	Exists  bool   `json:"exists"`
	Content string `json:"content"`
	Path    string `json:"path"` // of its file, also where there is none yet
}

// ReadPlan returns the session's plan.
//
// Experimental: the server's schema marks it so.
func (s *Session) ReadPlan(ctx context.Context) (Plan, error) {
	return ask[Plan](ctx, s.Call, "session.plan.read", nil)
}

// UpdatePlan writes the session's plan.
//
// Experimental: the server's schema marks it so.
func (s *Session) UpdatePlan(ctx context.Context, content string) error {
	return s.Call(ctx, "session.plan.update", map[string]string{"content": content}, nil)
}

// DeletePlan deletes the session's plan.
//
// Experimental: the server's schema marks it so.
func (s *Session) DeletePlan(ctx context.Context) error {
	return s.Call(ctx, "session.plan.delete", nil, nil)
}

// WorkspaceFiles lists the files of the session's workspace, by their paths in it.
//
// Experimental: the server's schema marks it so.
func (s *Session) WorkspaceFiles(ctx context.Context) ([]string, error) {
	r, err := ask[struct {
		Files []string `json:"files"`
	}](ctx, s.Call, "session.workspaces.listFiles", nil)
	return r.Files, err
}

// ReadWorkspaceFile returns the content of a file of the session's workspace. path is as in [Session.WorkspaceFiles].
//
// Experimental: the server's schema marks it so.
func (s *Session) ReadWorkspaceFile(ctx context.Context, path string) (string, error) {
	r, err := ask[struct {
		Content string `json:"content"`
	}](ctx, s.Call, "session.workspaces.readFile", map[string]string{"path": path})
	return r.Content, err
}

// CreateWorkspaceFile writes a file of the session's workspace, and makes the directories above it. A file that is there is replaced.
//
// Experimental: the server's schema marks it so.
func (s *Session) CreateWorkspaceFile(ctx context.Context, path, content string) error {
	return s.Call(ctx, "session.workspaces.createFile", map[string]string{"path": path, "content": content}, nil)
}

// StartFleet sends a prompt, "" for none, that a fleet of agents works on in parallel, and returns without waiting for them. A server that
// does not start it refuses, with an [*RPCError].
//
// Experimental: the server's schema marks it so.
func (s *Session) StartFleet(ctx context.Context, prompt string) error {
	r, err := ask[struct {
		Started *bool `json:"started"`
	}](ctx, s.Call, "session.fleet.start", struct {
		Prompt string `json:"prompt,omitempty"`
	}{prompt})
	if err == nil && r.Started != nil && !*r.Started {
		err = s.client.refused("session.fleet.start", "not started", s.id)
	}
	return err
}

// Compaction is what a compaction has done.
type Compaction struct {
	Success         bool           `json:"success"`
	TokensRemoved   int64          `json:"tokensRemoved"`
	MessagesRemoved int64          `json:"messagesRemoved"`
	SummaryContent  string         `json:"summaryContent"`
	ContextWindow   *ContextWindow `json:"contextWindow"`
}

// ContextWindow is how full a model's context window is, in tokens.
type ContextWindow struct {
	TokenLimit            int64 `json:"tokenLimit"`
	CurrentTokens         int64 `json:"currentTokens"`
	MessagesLength        int64 `json:"messagesLength"` // messages
	SystemTokens          int64 `json:"systemTokens"`
	ConversationTokens    int64 `json:"conversationTokens"`
	ToolDefinitionsTokens int64 `json:"toolDefinitionsTokens"`
}

// Compact replaces the conversation so far by a summary, at the cost of a call of the model. The server refuses when there is nothing to
// compact.
//
// Experimental: the server's schema marks it so.
func (s *Session) Compact(ctx context.Context) (Compaction, error) {
	return ask[Compaction](ctx, s.Call, "session.history.compact", nil)
}

// LogLevel is how grave a log entry is.
type LogLevel string

// The log levels.
const (
	LogInfo    LogLevel = "info"
	LogWarning LogLevel = "warning"
	LogError   LogLevel = "error"
)

// LogOptions describes a log entry.
type LogOptions struct {
	Level     LogLevel `json:"level,omitempty"`     // "" means LogInfo
	Type      string   `json:"type,omitempty"`      // what it is about; "" means notification
	Ephemeral bool     `json:"ephemeral,omitempty"` // not stored
	URL       string   `json:"url,omitempty"`       // a page that helps
	Tip       string   `json:"tip,omitempty"`       // what to do; with LogInfo only
}

// Log adds an entry of the host's to the session: an event session.info, session.warning or session.error. The last one ends no turn
// that is waited for here; other clients may take it for a failure.
//
// Experimental: the server's schema marks it so.
func (s *Session) Log(ctx context.Context, message string, o *LogOptions) error {
	o = or(o, LogOptions{})
	var then func(json.RawMessage, error)
	switch o.Level {
	case "", LogInfo, LogWarning:
	case LogError:
		then = s.logged
		s.mu.Lock()
		s.turns.logging++
		s.mu.Unlock()
	default:
		return s.errorFor(fmt.Errorf("%w: LogOptions.Level: %.64q is unknown", ErrInvalidConfig, string(o.Level)))
	}
	_, err := s.call(ctx, "session.log", struct {
		Message string `json:"message"`
		*LogOptions
	}{message, o}, then)
	return err
}

// logged runs, on the reader, when a Log with level error is over.
func (s *Session) logged(raw json.RawMessage, _ error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.turns.logDone(unquote(member(raw, "eventId")))
}

// UI asks the users of the session's clients, one of which may be this one: what it is asked, SessionConfig.OnElicitation answers. Its methods
// wait, as long as ctx lasts, for somebody to answer. They return ErrNotSupported, and send nothing, while no client can show forms.
type UI struct{ session *Session }

// UI returns the access to the session's users.
func (s *Session) UI() UI { return UI{s} }

// Elicit shows a form and returns what became of it. schema is a JSON Schema object whose properties are the form's fields: flat, of type string,
// number, integer, boolean, or array of choices. The content is not checked against it, here or by the server.
//
// Experimental: the server's schema marks it so.
func (u UI) Elicit(ctx context.Context, message string, schema any) (ElicitationResult, error) {
	return elicit[ElicitationResult](ctx, u, message, schema)
}

func elicit[T any](ctx context.Context, u UI, message string, schema any) (result T, err error) {
	if err = u.session.failure(); err == nil && !u.session.Capabilities().UI.Elicitation {
		err = fmt.Errorf("%w: no client of the session can show forms", ErrNotSupported)
	}
	if err != nil {
		return result, u.session.errorFor(err)
	}
	return ask[T](ctx, u.session.Call, "session.ui.elicitation", struct {
		Message         string `json:"message"`
		RequestedSchema any    `json:"requestedSchema"`
	}{message, schema})
}

// field shows a form with one required field and returns its raw value, nil unless the form was accepted.
func (u UI) field(ctx context.Context, message, name string, schema any) (json.RawMessage, error) {
	r, err := elicit[struct {
		Action  string                     `json:"action"`
		Content map[string]json.RawMessage `json:"content"`
	}](ctx, u, message, struct {
		Type       string         `json:"type"`
		Properties map[string]any `json:"properties"`
		Required   []string       `json:"required"`
	}{"object", map[string]any{name: schema}, []string{name}})
	if err != nil || r.Action != "accept" {
		return nil, err
	}
	return r.Content[name], nil
}

// text is field for a string. ok is false for a form that was not accepted, or accepted with something else.
func (u UI) text(ctx context.Context, message, name string, schema any) (value string, ok bool, err error) {
	raw, err := u.field(ctx, message, name, schema)
	if err != nil || len(raw) == 0 || raw[0] != '"' {
		return "", false, err
	}
	return unquote(raw), true, nil
}

// Confirm asks a yes-or-no question. It returns true for an explicit yes only.
//
// Experimental: the server's schema marks it so.
func (u UI) Confirm(ctx context.Context, message string) (bool, error) {
	raw, err := u.field(ctx, message, "confirmed", struct {
		Type    string `json:"type"`
		Default bool   `json:"default"`
	}{"boolean", true})
	return string(raw) == "true", err
}

// Select asks for one of several options. ok is false when the user chose none.
//
// Experimental: the server's schema marks it so.
func (u UI) Select(ctx context.Context, message string, options []string) (choice string, ok bool, err error) {
	if len(options) == 0 {
		return "", false, u.session.errorFor(fmt.Errorf("%w: Select without options", ErrInvalidConfig))
	}
	choice, ok, err = u.text(ctx, message, "selection", struct {
		Type string   `json:"type"`
		Enum []string `json:"enum"`
	}{"string", options})
	if ok && !slices.Contains(options, choice) {
		return "", false, u.session.errorFor(errors.New("copilot: session.ui.elicitation: the answer is none of the options"))
	}
	return choice, ok, err
}

// InputOptions describes the field of an [UI.Input]. Members that are not set do not limit it.
type InputOptions struct {
	Title       string `json:"title,omitempty"`
	Description string `json:"description,omitempty"`
	MinLength   int    `json:"minLength,omitempty"` // characters, like MaxLength
	MaxLength   int    `json:"maxLength,omitempty"`
	Format      string `json:"format,omitempty"` // email, uri, date, date-time
	Default     string `json:"default,omitempty"`
}

// Input asks for a line of text. ok is false when the user gave none. What was given is not checked against o, here or by the server.
//
// Experimental: the server's schema marks it so.
func (u UI) Input(ctx context.Context, message string, o *InputOptions) (value string, ok bool, err error) {
	return u.text(ctx, message, "value", struct {
		Type string `json:"type"`
		*InputOptions
	}{"string", o})
}

// AgentInfo describes an agent that a session can be handed to.
type AgentInfo struct {
	ID                     string    `json:"id"`
	Name                   string    `json:"name"`
	DisplayName            string    `json:"displayName"`
	Description            string    `json:"description"`
	Path                   string    `json:"path"`   // of its file, "" when it has none
	Source                 string    `json:"source"` // user, project, inherited, remote, plugin, builtin
	UserInvocable          *bool     `json:"userInvocable"`
	DisableModelInvocation bool      `json:"disableModelInvocation"`
	Tools                  *[]string `json:"tools"` // nil means the default ones
	Model                  string    `json:"model"`
	ReasoningEffort        string    `json:"reasoningEffort"`
	Skills                 []string  `json:"skills"`
}

// Agents lists the session's custom agents.
//
// Experimental: the server's schema marks it so.
func (s *Session) Agents(ctx context.Context) ([]AgentInfo, error) {
	r, err := ask[struct {
		Agents []AgentInfo `json:"agents"`
	}](ctx, s.Call, "session.agent.list", nil)
	return r.Agents, err
}

// Agent returns the custom agent that the session is handed to, nil when there is none.
//
// Experimental: the server's schema marks it so.
func (s *Session) Agent(ctx context.Context) (*AgentInfo, error) {
	r, err := ask[struct {
		Agent *AgentInfo `json:"agent"`
	}](ctx, s.Call, "session.agent.getCurrent", nil)
	return r.Agent, err
}

// SelectAgent hands the session to one of its custom agents, "" takes it back.
//
// Experimental: the server's schema marks it so.
func (s *Session) SelectAgent(ctx context.Context, name string) error {
	if name == "" {
		return s.Call(ctx, "session.agent.deselect", nil, nil)
	}
	return s.Call(ctx, "session.agent.select", map[string]string{"name": name}, nil)
}

// Skills lists the session's skills.
//
// Experimental: the server's schema marks it so.
func (s *Session) Skills(ctx context.Context) ([]LoadedSkill, error) {
	r, err := ask[struct {
		Skills []LoadedSkill `json:"skills"`
	}](ctx, s.Call, "session.skills.list", nil)
	return r.Skills, err
}

// MCPServers lists the session's MCP servers and how they are.
//
// Experimental: the server's schema marks it so.
func (s *Session) MCPServers(ctx context.Context) ([]LoadedMCPServer, error) {
	r, err := ask[struct {
		Servers []LoadedMCPServer `json:"servers"`
	}](ctx, s.Call, "session.mcp.list", nil)
	return r.Servers, err
}

// ToolInfo describes a tool that the model can call.
type ToolInfo struct {
	Name           string          `json:"name"`
	NamespacedName string          `json:"namespacedName"`
	MCPServerName  string          `json:"mcpServerName"` // "" for tools of other origin, like MCPToolName
	MCPToolName    string          `json:"mcpToolName"`
	Description    string          `json:"description"`
	InputSchema    json.RawMessage `json:"input_schema"`
	DeferLoading   bool            `json:"deferLoading"` // found by tool search only
}

// Tools lists the tools that the model can call. The server makes the list with a message: before the first one, and after a change such as
// another model until the next, it is empty.
//
// Experimental: the server's schema marks it so.
func (s *Session) Tools(ctx context.Context) ([]ToolInfo, error) {
	r, err := ask[struct {
		Tools []ToolInfo `json:"tools"`
	}](ctx, s.Call, "session.tools.getCurrentMetadata", nil)
	return r.Tools, err
}

// TaskInfo describes work in the background: an agent, a shell command, or a task of a client.
type TaskInfo struct {
	Type           string     `json:"type"` // agent, shell, client
	ID             string     `json:"id"`
	DisplayName    string     `json:"displayName"`
	Description    string     `json:"description"`
	Status         string     `json:"status"` // running, idle, completed, failed, cancelled; of clients also orphaned
	StartedAt      time.Time  `json:"startedAt"`
	CompletedAt    *time.Time `json:"completedAt"`
	Error          string     `json:"error"`
	ToolCallID     string     `json:"toolCallId"` // of agents, like the following
	AgentType      string     `json:"agentType"`
	Prompt         string     `json:"prompt"`
	LatestResponse string     `json:"latestResponse"`
	Command        string     `json:"command"` // of shells, like the following
	PID            int        `json:"pid"`     // 0 when unknown
	LogPath        string     `json:"logPath"`
}

// Tasks lists the session's work in the background, what is done included.
//
// Experimental: the server's schema marks it so.
func (s *Session) Tasks(ctx context.Context) ([]TaskInfo, error) {
	r, err := ask[struct {
		Tasks []TaskInfo `json:"tasks"`
	}](ctx, s.Call, "session.tasks.list", nil)
	return r.Tasks, err
}

// CancelTask ends work in the background. It returns false when there was none with this id, or it was over.
//
// Experimental: the server's schema marks it so.
func (s *Session) CancelTask(ctx context.Context, id string) (bool, error) {
	r, err := ask[struct {
		Cancelled bool `json:"cancelled"`
	}](ctx, s.Call, "session.tasks.cancel", map[string]string{"id": id})
	return r.Cancelled, err
}

// Queue is what waits for a session's turn to end, or to take it in.
type Queue struct {
	Items            []QueueItem `json:"items"`            // messages and commands, first the next one
	SteeringMessages []string    `json:"steeringMessages"` // for the turn that runs
}

// QueueItem is a message or command that waits.
type QueueItem struct {
	ID          string    `json:"id"`
	MessageID   string    `json:"messageId"` // as [Session.Send] returned it, "" for commands
	Kind        string    `json:"kind"`      // message, command
	DisplayText string    `json:"displayText"`
	AgentMode   AgentMode `json:"agentMode"`
	Source      string    `json:"source"`
}

// Queue returns what waits.
//
// Experimental: the server's schema marks it so.
func (s *Session) Queue(ctx context.Context) (Queue, error) {
	return ask[Queue](ctx, s.Call, "session.queue.pendingItems", nil)
}

// ClearQueue removes everything that waits. The turn that runs goes on.
//
// Experimental: the server's schema marks it so.
func (s *Session) ClearQueue(ctx context.Context) error {
	return s.Call(ctx, "session.queue.clear", nil, nil)
}

// Usage is what a session has used so far.
type Usage struct {
	SessionStartTime        time.Time              `json:"sessionStartTime"`
	CurrentModel            string                 `json:"currentModel"`
	TotalPremiumRequestCost float64                `json:"totalPremiumRequestCost"`
	TotalUserRequests       int64                  `json:"totalUserRequests"`
	TotalNanoAIU            float64                `json:"totalNanoAiu"`
	TotalAPIDurationMs      int64                  `json:"totalApiDurationMs"`
	TokenDetails            map[string]TokenCount  `json:"tokenDetails"` // by token type
	ModelMetrics            map[string]ModelMetric `json:"modelMetrics"` // by model id
	AgentMetrics            map[string]AgentMetric `json:"agentMetrics"` // by agent id; the main one's is main
	CodeChanges             CodeChanges            `json:"codeChanges"`
	LastCallInputTokens     int64                  `json:"lastCallInputTokens"` // of the main agent
	LastCallOutputTokens    int64                  `json:"lastCallOutputTokens"`
}

// Usage returns what the session has used so far.
//
// Experimental: the server's schema marks it so.
func (s *Session) Usage(ctx context.Context) (Usage, error) {
	return ask[Usage](ctx, s.Call, "session.usage.getMetrics", nil)
}

// PermissionMode says who decides on what the agent wants to do.
type PermissionMode string

// The permission modes.
const (
	PermissionsManual   PermissionMode = "manual"    // rules, then SessionConfig.OnPermission
	PermissionsAssisted PermissionMode = "assisted"  // a model approves what is harmless
	PermissionsAllowAll PermissionMode = "allow-all" // everything is approved, nobody is asked
)

// PermissionMode returns the session's permission mode.
//
// Experimental: the server's schema marks it so.
func (s *Session) PermissionMode(ctx context.Context) (PermissionMode, error) {
	r, err := ask[struct {
		Mode PermissionMode `json:"mode"`
	}](ctx, s.Call, "session.permissions.getMode", nil)
	return r.Mode, err
}

// SetPermissionMode changes the session's permission mode, for all its clients. Policies may forbid it.
//
// Experimental: the server's schema marks it so.
func (s *Session) SetPermissionMode(ctx context.Context, mode PermissionMode) error {
	const method = "session.permissions.setMode"
	r, err := ask[outcome](ctx, s.Call, method, map[string]PermissionMode{"mode": mode})
	if err != nil {
		return err
	}
	return r.refusal(s.client, method, s.id)
}

// Truncate removes an event and everything after it from the session's history, and returns how many events that were.
//
// Experimental: the server's schema marks it so.
func (s *Session) Truncate(ctx context.Context, eventID string) (int, error) {
	r, err := ask[struct {
		EventsRemoved int `json:"eventsRemoved"`
	}](ctx, s.Call, "session.history.truncate", map[string]string{"eventId": eventID})
	return r.EventsRemoved, err
}
