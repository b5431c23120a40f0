package copilot

// This file is how a session begins: its configuration, and the one path on which create and resume start.
//
// Its one idea: everything that can be decided is decided before a byte is written, and a start that does not succeed undoes exactly what
// it did, here and on the server.

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// PreparedSession is a session that has been validated and allocated, and not started: nothing has been written and nothing is
// registered. Subscriptions taken from it see every event that is routed to the session, from the first. One that is not started may simply be
// dropped.
//
// Where the server chooses the id (SessionConfig.Cloud without SessionID), what it sends before its answer cannot be routed
// and is lost; giving an id closes that hole.
type PreparedSession struct {
	session *Session
	id      string
	method  string
	config  *encodedConfig
	state   atomic.Int32 // prepared, then started or given up
}

const (
	prepared int32 = iota
	started
	givenUp
)

// PrepareSession validates cfg, nil for defaults, and prepares a new session. Nothing of cfg is kept by reference. Errors match ErrInvalidConfig.
func (c *Client) PrepareSession(cfg *SessionConfig) (*PreparedSession, error) {
	id := ""
	switch {
	case cfg == nil || cfg.SessionID == "" && cfg.Cloud == nil:
		id = newUUID()
	default:
		id = cfg.SessionID
	}
	return c.prepare(startCreate, "session.create", id, cfg)
}

// PrepareResumeSession is [Client.PrepareSession] for the stored session with this id. cfg.SessionID must be empty or equal to it.
func (c *Client) PrepareResumeSession(id string, cfg *SessionConfig) (*PreparedSession, error) {
	if id == "" {
		return nil, fmt.Errorf("%w: resume needs a session id", ErrInvalidConfig)
	}
	return c.prepare(startResume, "session.resume", id, cfg)
}

func (c *Client) prepare(kind startKind, method, id string, cfg *SessionConfig) (*PreparedSession, error) {
	if cfg == nil {
		cfg = &SessionConfig{}
	}
	if cfg.GitHubTokenProvider != nil && cfg.GitHubTokenProviderRegistrationID == "" {
		registered := *cfg
		registered.GitHubTokenProviderRegistrationID = newUUID()
		cfg = &registered
	}
	encoded, err := cfg.encode(kind, id, c.opts)
	if err != nil {
		return nil, err
	}
	s := newSession(c, id, kind, cfg)
	secrets := encoded.secrets // not by reference: the rest is garbage after the start
	s.secrets = &secrets
	if s.hosted, err = c.hosting(id, cfg); err != nil {
		return nil, err
	}
	return &PreparedSession{session: s, id: id, method: method, config: encoded}, nil
}

// SessionID returns the id that the session will have, "" when the server will choose it.
func (p *PreparedSession) SessionID() string { return p.id }

// Subscribe returns a subscription that begins with the next event, which is the first one before Start.
func (p *PreparedSession) Subscribe() *Subscription[Event] { return p.session.Subscribe() }

// Events subscribes, now, and returns the sequence of events, see [Session.Events].
func (p *PreparedSession) Events(ctx context.Context) iter.Seq2[Event, error] {
	return p.session.Events(ctx)
}

// Close gives the prepared session up: its subscriptions end cleanly. It does nothing once Start has been called.
func (p *PreparedSession) Close() error {
	if p.state.CompareAndSwap(prepared, givenUp) {
		p.session.end(ErrClosed)
	}
	return nil
}

// CreateSession creates a session: it is [Client.PrepareSession] and [PreparedSession.Start], whose errors it returns. A nil cfg means
// defaults, with which nothing that needs a permission is done.
func (c *Client) CreateSession(ctx context.Context, cfg *SessionConfig) (*Session, error) {
	p, err := c.PrepareSession(cfg)
	if err != nil {
		return nil, err
	}
	return p.Start(ctx)
}

// ResumeSession goes on with the stored session that has this id: it is [Client.PrepareResumeSession] and [PreparedSession.Start], whose errors
// it returns. Tools, handlers, providers and most of the rest of cfg are not stored, and have to be given again.
func (c *Client) ResumeSession(ctx context.Context, id string, cfg *SessionConfig) (*Session, error) {
	p, err := c.PrepareResumeSession(id, cfg)
	if err != nil {
		return nil, err
	}
	return p.Start(ctx)
}

// phase is how far a session has come. It is guarded by Client.mu.
type phase int

const (
	starting phase = iota // registered, or about to be
	open
	leaving // its release has been asked for
)

// start is the server's view of a session that is being started. It is guarded by Client.mu.
type start struct {
	ctx       context.Context
	invalid   error // why the answer cannot be read
	abandoned bool  // ctx ended before the answer came
	accepted  bool  // the server has a session under this id, by this start or an abandoned one before it
}

// Start creates or resumes the session. It works once: later calls return ErrAlreadyStarted, after Close ErrClosed. An id that this client
// has open already, or is starting or leaving, is refused with ErrSessionOpen. ctx bounds the start only.
//
// When it fails, for whatever reason, nothing is left: subscriptions end with the cause, the id can be used again at once, and if the server
// has the session, now or by an answer that comes late, it is released in the background. Errors are a [*SessionError] around the
// cause: [*RPCError] (which may match ErrSessionNotFound, ErrCannotResume or ErrAuthentication), [*SessionIDMismatchError], ctx's error, or
// the connection's end.
func (p *PreparedSession) Start(ctx context.Context) (*Session, error) {
	s := p.session
	if !p.state.CompareAndSwap(prepared, started) {
		if p.state.Load() == givenUp {
			return nil, ErrClosed
		}
		return nil, ErrAlreadyStarted
	}
	s.start = &start{ctx: ctx}
	err := p.run(ctx)
	if err == nil {
		return s, nil
	}
	return nil, s.client.retire(s, err)
}

func (p *PreparedSession) run(ctx context.Context) error {
	s, c := p.session, p.session.client
	if err := c.reserve(ctx, s); err != nil {
		return err
	}
	params := c.withTrace(ctx, p.config.params)
	raw, err := c.do(ctx, &call{method: p.method, then: s.answered, until: s.ctx.Done()}, params)
	if cause := s.failure(); cause != nil && errors.Is(err, ErrClosed) {
		return cause
	}
	if err != nil {
		return err
	}
	if err := s.opened(raw); err != nil {
		return err
	}
	if err := p.followUp(ctx); err != nil {
		return err
	}
	c.mu.Lock()
	owner := c.routes[s.id].session == s && s.phase == starting
	if owner {
		s.phase, s.start = open, nil
	}
	c.mu.Unlock()
	if owner {
		return nil
	}
	select {
	case <-ctx.Done(): // another start took its place while the last answer was on its way
		return contextError(ctx)
	case <-s.ctx.Done(): // it is being ended
		return s.failure()
	}
}

// reserve makes s the owner of its id. A start whose ctx has ended gives way; a release of the id that is under way is awaited,
// since the server works on requests concurrently.
func (c *Client) reserve(ctx context.Context, s *Session) error {
	for {
		if ctx.Err() != nil {
			return contextError(ctx)
		}
		c.mu.Lock()
		if err := c.ending(); err != nil {
			c.mu.Unlock()
			return err
		}
		owner := c.routes[s.id]
		switch {
		case s.id == "": // routed by answered
		case owner.session == s:
		case owner.watch != nil, owner.session != nil && !owner.session.givesWay():
			c.mu.Unlock()
			return ErrSessionOpen
		default:
			if owner.session != nil && owner.session.start.accepted {
				s.start.accepted, owner.session.start.accepted = true, false // what it leaves on the server is ours to use or to release
			}
			c.routes[s.id] = route{session: s}
		}
		pending := c.releases[s.id]
		if pending == nil {
			s.live = true
			c.registerLocked(s)
			c.mu.Unlock()
			return nil
		}
		c.mu.Unlock()
		_ = pending.wait(ctx) // refused or not, the server is done with it
	}
}

// ending is why nothing new can begin, nil while it can. What is registered under the c.mu under which that was asked is found by the end.
func (c *Client) ending() error {
	if err := c.conn.failure(); err != nil {
		return err
	}
	if c.stopping.Load() {
		return ErrClosed
	}
	return nil
}

// givesWay reports whether a start has been given up by its caller, even if that has not returned yet.
func (s *Session) givesWay() bool { return s.phase == starting && s.start.ctx.Err() != nil }

// answered runs on the reader when the server has answered the start, before the next frame is read.
func (s *Session) answered(raw json.RawMessage, err error) {
	if err != nil {
		return
	}
	invalid := s.adopt(raw)
	c := s.client
	c.mu.Lock()
	defer c.mu.Unlock()
	if invalid != nil {
		s.start.invalid = fmt.Errorf("copilot: the answer to a start: %w", clipped{invalid})
	}
	id := unquote(member(raw, "sessionId"))
	if id == "" {
		id = s.id
	}
	switch owner := c.routes[id]; {
	case id == "":
	case owner == (route{}) && s.id == "" && !s.start.abandoned && c.ending() == nil:
		s.id, s.start.accepted = id, true
		c.routes[id] = route{session: s}
	case owner == (route{}), owner.session != nil && owner.session.phase == leaving: // nobody is left who wants it
		c.releaseLocked(id, "session.destroy")
		c.conn.log.Debug("copilot: releasing what a start left on the server")
	case owner.session != nil && owner.session.phase == starting:
		owner.session.start.accepted = true // ours, or started again meanwhile: that start's to use or to release
	}
}

// startAnswer is what the server says of a session that it has opened.
type startAnswer struct {
	WorkspacePath       string          `json:"workspacePath"`
	RemoteURL           string          `json:"remoteUrl"`
	Capabilities        json.RawMessage `json:"capabilities"`
	OpenCanvases        []OpenCanvas    `json:"openCanvases"`
	OpenCanvasInstances []OpenCanvas    `json:"openCanvasInstances"` // its name in old servers
}

// adopt takes over what the answer says, on the reader: the events behind it may change that again.
func (s *Session) adopt(raw json.RawMessage) error {
	var a startAnswer
	if err := json.Unmarshal(raw, &a); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.workspacePath, s.remoteURL = a.WorkspacePath, a.RemoteURL
	s.capabilities.merge(a.Capabilities)
	for _, canvas := range append(a.OpenCanvases, a.OpenCanvasInstances...) {
		s.putCanvasLocked(canvas)
	}
	return nil
}

// opened checks the answer of the server.
func (s *Session) opened(raw json.RawMessage) error {
	s.client.mu.Lock()
	invalid := s.start.invalid
	s.client.mu.Unlock()
	if invalid != nil {
		return invalid
	}
	switch id := member(raw, "sessionId"); {
	case id == nil && s.kind == startResume: // servers from before it was sent
	case unquote(id) == "":
		return errors.New("copilot: the answer to a start has no session id")
	case s.id == "": // answered did not take it
		return cmp.Or(s.client.ending(), ErrSessionOpen)
	case unquote(id) != s.id:
		return &SessionIDMismatchError{Requested: s.id, Returned: unquote(id)}
	}
	return nil
}

// followUp sends the requests that complete a start. None is sent after one that failed.
func (p *PreparedSession) followUp(ctx context.Context) error {
	s := p.session
	if s.host.mcpAuth != nil {
		params := map[string]string{"eventType": string(EventMCPOAuthRequired)}
		if _, err := s.call(ctx, "session.eventLog.registerInterest", params, nil); err != nil {
			return err
		}
	}
	if p.config.update != nil {
		_, err := s.call(ctx, "session.options.update", p.config.update, nil)
		return err
	}
	return nil
}

// retire undoes a start that did not succeed: it removes the route that this start installed, and no other, and releases what the
// server may have. It returns the error of the start.
func (c *Client) retire(s *Session, cause error) error {
	c.mu.Lock()
	cause = s.errorFor(cause)
	s.start.abandoned = true
	if c.routes[s.id].session == s {
		delete(c.routes, s.id)
	}
	if s.start.accepted && s.phase == starting && c.routes[s.id] == (route{}) {
		c.releaseLocked(s.id, "session.destroy")
	}
	c.mu.Unlock()
	if errors.Is(cause, ErrClosed) {
		s.end(ErrClosed) // a clean one for who reads
	} else {
		s.end(cause)
	}
	return cause
}

// release is a session.destroy or sessions.close on its way. It belongs to the client, not to a caller.
type release struct {
	id    string
	again string // guarded by Client.mu: the method to send once more
	done  chan struct{}
	err   error // valid after done
}

// wait returns nil when the server has let go.
func (r *release) wait(ctx context.Context) error {
	select {
	case <-r.done:
		return r.err
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", errUnanswered, contextError(ctx))
	}
}

// releaseLocked begins the release of an id. Where one is under way it is followed by another, since the server may have worked on that before
// it made what is to be released now. c.mu is held.
func (c *Client) releaseLocked(id, method string) *release {
	if r := c.releases[id]; r != nil {
		r.again = method
		return r
	}
	r := &release{id: id, done: make(chan struct{})}
	c.releases[id] = r
	go c.runRelease(r, method) // owned by the client; ends with the answer or the connection
	return r
}

func (c *Client) runRelease(r *release, method string) {
	for method != "" {
		_, r.err = c.callAlways(context.Background(), method, map[string]string{"sessionId": r.id}, nil)
		if errors.Is(r.err, ErrSessionNotFound) { // like success: false: it is gone already
			r.err = nil
		}
		c.mu.Lock()
		if method, r.again = r.again, ""; method == "" {
			delete(c.releases, r.id)
		}
		c.mu.Unlock()
	}
	close(r.done)
}

// withSession adds the session id to the params of a call. Params must be a JSON object, or nothing, and name no other session.
func withSession(id string, params any) (json.RawMessage, error) {
	raw := json.RawMessage("{}")
	if params != nil {
		var err error
		if raw, err = marshal(params); err != nil {
			return nil, fmt.Errorf("%w: params: %w", ErrInvalidConfig, err)
		}
	}
	s := scanner{b: raw}
	switch {
	case string(raw) == "null":
		raw = json.RawMessage("{}")
	case s.peek() != '{':
		return nil, fmt.Errorf("%w: params of a session's call must be an object", ErrInvalidConfig)
	}
	if named := member(raw, "sessionId"); named != nil {
		if unquote(named) != id {
			return nil, fmt.Errorf("%w: params name another session", ErrInvalidConfig)
		}
		return raw, nil
	}
	return splice(raw, "sessionId", id), nil
}

// splice adds a string member at the front of a JSON object.
func splice(object json.RawMessage, name, value string) json.RawMessage {
	s := scanner{b: object}
	s.peek()
	rest := object[s.i+1:]
	b := append(make([]byte, 0, len(object)+len(name)+len(value)+16), '{')
	b = append(appendQuoted(b, name), ':')
	b = appendQuoted(b, value)
	if inner := (scanner{b: rest}); inner.peek() != '}' {
		b = append(b, ',')
	}
	return append(b, rest...)
}

// withTrace adds the W3C trace context of a call: what Options.TraceContext says or, without it, that of the handler which makes the call.
func (c *Client) withTrace(ctx context.Context, params json.RawMessage) json.RawMessage {
	get := c.opts.TraceContext
	if get == nil {
		get = TraceContextFrom
	}
	parent, state := get(ctx)
	if state != "" {
		params = splice(params, "tracestate", state)
	}
	if parent != "" {
		params = splice(params, "traceparent", parent)
	}
	return params
}

// newUUID returns a random UUID, version 4.
func newUUID() string {
	var b [16]byte
	if _, err := rand.Read(b[:]); err != nil {
		panic(err) // crypto/rand: the system has no randomness, nothing can go on
	}
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	text := make([]byte, 0, 36)
	for i, group := range [][]byte{b[:4], b[4:6], b[6:8], b[8:10], b[10:]} {
		if i > 0 {
			text = append(text, '-')
		}
		text = hex.AppendEncode(text, group)
	}
	return string(text)
}

// SessionConfig says how a session is created or resumed. A nil one and the zero value mean the server's defaults.
// It is read, and never changed, during the call it is given to; nothing of it is kept afterwards except its functions.
//
// A nil pointer, nil list, nil map or empty string is unset: the server decides. An empty list that is not nil is sent
// as an empty list. Unless a comment says otherwise a field serves create and resume alike, and has to be given again on
// resume. Printing a SessionConfig, by package fmt, encoding/json or log/slog, shows no token, key, header or environment value.
//
// The JSON names are the protocol's.
type SessionConfig struct {
	// SessionID is the id to create, 1 to 250 characters out of A-Z, a-z, 0-9, "_" and "-". Empty means a new UUID, or with
	// Cloud one of the server's choice. On resume it is empty or equal to the id that is resumed. Never reuse an id for create.
	SessionID string `json:"-"`
	// EventBuffer is how many events the session's ring holds; 0 means 512.
	EventBuffer int `json:"-"`

	// ClientName names the application in the User-Agent of model requests.
	ClientName string `json:"clientName,omitempty"`
	// Name is the session's title. Create only.
	Name string `json:"name,omitempty,create"`

	// Model is a model id, or "provider/id" for one of Models. The server checks it with the first turn only.
	Model string `json:"model,omitempty"`
	// ReasoningEffort is what the model defines: "low", "medium", "high", "xhigh", "max".
	ReasoningEffort string `json:"reasoningEffort,omitempty"`
	// ReasoningSummary is "none", "concise" or "detailed".
	ReasoningSummary string `json:"reasoningSummary,omitempty"`
	// Verbosity is "low", "medium" or "high".
	Verbosity string `json:"verbosity,omitempty"`
	// ContextTier is "default" or "long_context".
	ContextTier string `json:"contextTier,omitempty"`
	// ModelCapabilities overrides, member by member, what the server knows of the model.
	ModelCapabilities *ModelCapabilities `json:"modelCapabilities,omitempty"`
	// Streaming asks for delta events besides the final messages, and makes the server's requests to the model streaming ones. It is always
	// sent: of the clients that share a session, the last to create or resume it decides for all.
	Streaming bool `json:"streaming"`
	// IncludeSubAgentStreamingEvents forwards the deltas of sub-agents too; nil means true.
	IncludeSubAgentStreamingEvents *bool `json:"includeSubAgentStreamingEvents,omitempty"`

	// Provider brings a model endpoint of your own for the whole session. It excludes Providers and Models.
	Provider *ProviderConfig `json:"provider,omitempty"`
	// Providers adds endpoints to the ones the server has; Models lists their models.
	Providers []NamedProviderConfig `json:"providers,omitempty"`
	// Models are the models of Providers.
	Models []ProviderModelConfig `json:"models,omitempty"`
	// CAPI tunes the use of the Copilot API.
	CAPI *CAPIOptions `json:"capi,omitempty"`

	// SystemMessage changes the system prompt.
	SystemMessage *SystemMessage `json:"systemMessage,omitempty"`
	// Transforms rewrite sections of the system prompt, by section id. Each adds a section with the action "transform" to
	// SystemMessage, whose Mode becomes "customize"; a section that SystemMessage has already stays as it is.
	Transforms map[string]func(ctx context.Context, content string) (string, error) `json:"-"`
	// OrganizationCustomInstructions is text added to the instructions found on disk.
	OrganizationCustomInstructions string `json:"organizationCustomInstructions,omitempty"`
	// EnableOnDemandInstructionDiscovery finds instruction files as the agent comes across them; empty mode: false.
	EnableOnDemandInstructionDiscovery *bool `json:"enableOnDemandInstructionDiscovery,omitempty"`
	// RefreshCustomInstructions drops the server's instruction cache first. Create only.
	RefreshCustomInstructions *bool `json:"refreshCustomInstructions,omitempty,create"`
	// SkipCustomInstructions ignores instruction files; empty mode: true.
	SkipCustomInstructions *bool `json:"skipCustomInstructions,omitempty"`
	// InstructionDirectories are searched for instructions too.
	InstructionDirectories []string `json:"instructionDirectories,omitempty"`

	// Tools are the host's own tools.
	Tools []Tool `json:"tools,omitempty"`
	// ToolSearch lets the model find tools instead of being given all.
	ToolSearch *ToolSearch `json:"toolSearch,omitempty"`
	// AvailableTools is the list of allowed tools: "builtin:name", "mcp:name", "custom:name", "*" after the colon, or a bare
	// name, but never a bare "*". Nil allows all, an empty list none. Empty mode demands a list.
	AvailableTools []string `json:"availableTools,omitempty"`
	// ExcludedTools takes tools away, in the syntax of AvailableTools, and wins over it.
	ExcludedTools []string `json:"excludedTools,omitempty"`
	// Commands are the host's slash commands.
	Commands []Command `json:"commands,omitempty"`

	// MCPServers are MCP servers by name.
	MCPServers map[string]MCPServerConfig `json:"mcpServers,omitempty"`
	// DisabledMCPServers turns servers off by exact name; a resumed session that is still in memory keeps running ones.
	DisabledMCPServers []string `json:"disabledMcpServers,omitempty"`
	// MCPOAuthTokenStorage is "persistent" or "in-memory"; empty mode: "in-memory".
	MCPOAuthTokenStorage string `json:"mcpOAuthTokenStorage,omitempty"`
	// AuthClientIDMetadataURL is an OAuth client metadata document: https, with a path.
	AuthClientIDMetadataURL string `json:"authClientIdMetadataUrl,omitempty"`
	// GitHubMCPToolConfig chooses what GitHub's own MCP server offers.
	GitHubMCPToolConfig *GitHubMCPToolConfig `json:"githubMcpToolConfig,omitempty"`
	// RequestMCPApps asks for MCP apps. Experimental: Capabilities tells whether the server granted it.
	RequestMCPApps *bool `json:"requestMcpApps,omitempty"`
	// Diagnostics sets how much the server reports of its sources.
	Diagnostics *Diagnostics `json:"diagnostics,omitempty"`

	// CustomAgents are agents besides the built-in ones.
	CustomAgents []CustomAgent `json:"customAgents,omitempty"`
	// CustomAgentsLocalOnly ignores the organization's agents; empty mode: true.
	CustomAgentsLocalOnly *bool `json:"customAgentsLocalOnly,omitempty"`
	// ExcludedBuiltinAgents hides built-in agents by name.
	ExcludedBuiltinAgents []string `json:"excludedBuiltinAgents,omitempty"`
	// DefaultAgent changes the agent that answers when no custom one is active.
	DefaultAgent *DefaultAgent `json:"defaultAgent,omitempty"`
	// Agent is the custom agent to activate.
	Agent string `json:"agent,omitempty"`

	// EnableSkills turns skills on or off; empty mode: false.
	EnableSkills *bool `json:"enableSkills,omitempty"`
	// SkillDirectories are searched for skills too.
	SkillDirectories []string `json:"skillDirectories,omitempty"`
	// DisabledSkills turns skills off by name.
	DisabledSkills []string `json:"disabledSkills,omitempty"`
	// PluginDirectories are searched for plugins too.
	PluginDirectories []string `json:"pluginDirectories,omitempty"`

	// WorkingDirectory is where the agent works; a relative one is made absolute here. Empty means the server's own. It must exist.
	WorkingDirectory string `json:"workingDirectory,omitempty"`
	// AdditionalDirectories may be used besides it; relative ones start there.
	AdditionalDirectories []string `json:"additionalDirectories,omitempty"`
	// ConfigDir is the root of this session's state and settings.
	ConfigDir string `json:"configDir,omitempty"`
	// EnableConfigDiscovery reads settings found on disk; unset means false.
	EnableConfigDiscovery *bool `json:"enableConfigDiscovery,omitempty"`
	// EnableFileHooks runs hooks declared in files; empty mode: false.
	EnableFileHooks *bool `json:"enableFileHooks,omitempty"`
	// EnableHostGitOperations lets the server use git on the host; empty mode: false.
	EnableHostGitOperations *bool `json:"enableHostGitOperations,omitempty"`
	// EnableFileChangeTracking records file changes, for rewinding and diffs.
	EnableFileChangeTracking *bool `json:"enableFileChangeTracking,omitempty"`
	// SandboxConfig is the sandbox's configuration, as the server defines it. Create only.
	SandboxConfig json.RawMessage `json:"sandboxConfig,omitempty,create"`

	// InfiniteSessions compacts the conversation before the context window is full.
	InfiniteSessions *InfiniteSessions `json:"infiniteSessions,omitempty"`
	// LargeOutput moves long tool output to files.
	LargeOutput *LargeOutput `json:"largeOutput,omitempty"`
	// Memory turns memories on or off; empty mode: off.
	Memory *Memory `json:"memory,omitempty"`
	// EnableSessionStore lets the agent search earlier sessions; empty mode: false.
	EnableSessionStore *bool `json:"enableSessionStore,omitempty"`
	// EmbeddingCacheStorage is "persistent" or "in-memory"; empty mode: "in-memory".
	EmbeddingCacheStorage string `json:"embeddingCacheStorage,omitempty"`
	// SkipEmbeddingRetrieval does without embeddings; empty mode: true.
	SkipEmbeddingRetrieval *bool `json:"skipEmbeddingRetrieval,omitempty"`
	// SessionLimits bounds what the session may spend.
	SessionLimits *SessionLimits `json:"sessionLimits,omitempty"`

	// GitHubToken is the identity of this session in place of the client's; the server checks it over the network. It excludes
	// GitHubTokenProviderRegistrationID.
	GitHubToken string `json:"gitHubToken,omitempty,secret"`
	// GitHubTokenProvider is asked for the identity of this session, during the start already, and again before a token expires. Nil, nil
	// says that there will be none. It excludes GitHubToken.
	GitHubTokenProvider func(ctx context.Context, r GitHubTokenRequest) (*GitHubAccessToken, error) `json:"-"`
	// GitHubTokenProviderRegistrationID is the UUID by which the server names the provider; "" means a new one. Without a
	// GitHubTokenProvider, the handler of "gitHubToken.getToken" in Handlers gets it.
	GitHubTokenProviderRegistrationID string `json:"gitHubTokenProviderRegistrationId,omitempty"`
	// EnableManagedSettings lets the server fetch the enterprise's policy.
	EnableManagedSettings *bool `json:"enableManagedSettings,omitempty"`
	// ManagedSettings is policy set by the host. It is not stored: a resume without it clears it.
	ManagedSettings *ManagedSettings `json:"managedSettings,omitempty"`
	// EnableSessionTelemetry reports usage to GitHub; always off with Provider; empty mode: false.
	EnableSessionTelemetry *bool `json:"enableSessionTelemetry,omitempty"`
	// CoauthorEnabled adds Copilot as co-author to commits; empty mode: false.
	CoauthorEnabled *bool `json:"coauthorEnabled,omitempty"`
	// ManageScheduleEnabled lets the agent schedule prompts; empty mode: false.
	ManageScheduleEnabled *bool `json:"manageScheduleEnabled,omitempty"`
	// EnableCitations asks for citations. Experimental.
	EnableCitations *bool `json:"enableCitations,omitempty"`
	// IsExperimentalMode turns the server's experimental features on; empty mode: false.
	IsExperimentalMode *bool `json:"isExperimentalMode,omitempty"`
	// FeatureFlags sets single features.
	FeatureFlags map[string]bool `json:"featureFlags,omitempty"`
	// ExpAssignments is an experiment assignment object; internal to GitHub.
	ExpAssignments json.RawMessage `json:"expAssignments,omitempty"`

	// RemoteSession is "off", "export" or "on".
	RemoteSession string `json:"remoteSession,omitempty"`
	// Cloud creates the session on GitHub's computers; empty options are meaningful. Create only.
	Cloud *CloudOptions `json:"cloud,omitempty,create"`

	// SessionFS holds the session's files, where [Options.SessionFS] declares that this client does.
	SessionFS SessionFS `json:"-"`

	// Canvases are the canvases this host can show.
	Canvases []CanvasDeclaration `json:"canvases,omitempty"`
	// CanvasProvider is a stable owner for Canvases.
	CanvasProvider *CanvasProvider `json:"canvasProvider,omitempty"`
	// OpenCanvases are the canvases known to be open from before. Resume only.
	OpenCanvases []OpenCanvas `json:"openCanvases,omitempty,resume"`
	// RequestCanvasRenderer asks for the canvas tools.
	RequestCanvasRenderer *bool `json:"requestCanvasRenderer,omitempty"`
	// RequestExtensions asks for the extension tools.
	RequestExtensions *bool `json:"requestExtensions,omitempty"`
	// ExtensionSDKPath is the SDK folder that extensions are given.
	ExtensionSDKPath string `json:"extensionSdkPath,omitempty"`
	// ExtensionInfo says which extension this client is.
	ExtensionInfo *ExtensionInfo `json:"extensionInfo,omitempty"`
	// Workflows are an extension's workflows, as the server defines them. Resume only.
	Workflows []json.RawMessage `json:"workflows,omitempty,resume"`
	// RequestedEnvironmentVariables are asked for by an extension that joins. Resume only.
	RequestedEnvironmentVariables []string `json:"requestedEnvironmentVariables,omitempty,resume"`

	// ContinuePendingWork keeps pending tool calls and permission requests alive, where a resume else marks them interrupted. The server
	// does not ask again: they are answered by their ids, with [Session.AnswerToolCall] and
	// [Session.AnswerPermission], see the example of [Client.PrepareResumeSession]. Resume only.
	ContinuePendingWork bool `json:"continuePendingWork,omitempty,resume"`
	// DisableResume suppresses the session.resume event. Resume only.
	DisableResume *bool `json:"disableResume,omitempty,resume"`

	// AskUserVariant is "legacy" or "elicitation": whether the agent's questions come to OnUserInput or OnElicitation.
	AskUserVariant string `json:"askUserVariant,omitempty"`

	// OnPermission decides on tools that need approval, those of Tools included. Without it they are denied by the server, unasked.
	OnPermission PermissionHandler `json:"requestPermission"`
	// OnUserInput answers the agent's questions; without it the agent cannot ask.
	OnUserInput func(ctx context.Context, r UserInputRequest) (UserInputResponse, error) `json:"requestUserInput"`
	// OnElicitation fills in forms of MCP servers and of [Session.UI].
	OnElicitation func(ctx context.Context, r ElicitationRequest) (ElicitationResult, error) `json:"requestElicitation"`
	// OnExitPlanMode approves plans.
	OnExitPlanMode func(ctx context.Context, r ExitPlanModeRequest) (ExitPlanModeResult, error) `json:"requestExitPlanMode"`
	// OnAutoModeSwitch is asked whether to go on with another model after a rate limit.
	OnAutoModeSwitch func(ctx context.Context, r AutoModeSwitchRequest) (AutoModeSwitchResponse, error) `json:"requestAutoModeSwitch"`
	// OnMCPAuth provides tokens for MCP servers; nil, nil declines.
	OnMCPAuth func(ctx context.Context, r MCPAuthRequest) (*MCPAuthToken, error) `json:"-"`
	// OnSampling lets MCP servers use the model: it returns MCP's CreateMessageResult, or nil to decline. Without it their requests are
	// left to other clients.
	OnSampling func(ctx context.Context, r SamplingRequest) (any, error) `json:"-"`
	// Hooks are functions that run at fixed points of the agent's work.
	Hooks *Hooks `json:"-"`
	// OnHook receives every hook that Hooks has no function for.
	OnHook func(ctx context.Context, h HookCall) (any, error) `json:"-"`
	// Handlers take any other request that the server sends for this session, by method name.
	Handlers map[string]HandlerFunc `json:"-"`

	// Extra holds further members of the request, for a server newer than this package. A member that is sent already is refused.
	Extra map[string]json.RawMessage `json:"-"`
}

// ProviderConfig is a model endpoint for a whole session, in place of GitHub's ("bring your own key"); no login is needed then. It is not stored
// and has to be given again on resume. Printing it shows neither key, token nor header values.
type ProviderConfig struct {
	// Type is "openai" (the default), "azure" or "anthropic".
	Type string `json:"type,omitempty"`
	// WireAPI is "completions" (the default) or "responses".
	WireAPI string `json:"wireApi,omitempty"`
	// Transport is "http" (the default) or "websockets".
	Transport string `json:"transport,omitempty"`
	// BaseURL is the endpoint, to which the server adds the path of the API: "http://localhost:8080/v1" becomes
	// http://localhost:8080/v1/chat/completions. Required.
	BaseURL string `json:"baseUrl,required"`
	// APIKey is a static key.
	APIKey string `json:"apiKey,omitempty,secret"`
	// BearerToken is a static token; it wins over APIKey.
	BearerToken string `json:"bearerToken,omitempty,secret"`
	// BearerTokenProvider is called before every model request, with the provider's name ("default" here); it should cache.
	// The token comes without "Bearer ".
	BearerTokenProvider func(ctx context.Context, provider string) (string, error) `json:"hasBearerTokenProvider,omitempty"`
	// Azure holds what only Azure needs.
	Azure *AzureOptions `json:"azure,omitempty"`
	// Headers are added to every model request.
	Headers map[string]string `json:"headers,omitempty,secret"`
	// ModelID is a well-known model whose limits and behaviour are assumed.
	ModelID string `json:"modelId,omitempty"`
	// WireModel is the model name sent to the endpoint.
	WireModel string `json:"wireModel,omitempty"`
	// MaxPromptTokens limits the prompt, in tokens; 0 is unset.
	MaxPromptTokens int64 `json:"maxPromptTokens,omitempty"`
	// MaxContextWindowTokens is the size of the context window, in tokens; 0 is unset.
	MaxContextWindowTokens int64 `json:"maxContextWindowTokens,omitempty"`
	// MaxOutputTokens limits one answer, in tokens; 0 is unset.
	MaxOutputTokens int64 `json:"maxOutputTokens,omitempty"`
	// ModelCapabilities overrides what ModelID implies.
	ModelCapabilities *ModelCapabilities `json:"modelCapabilities,omitempty"`
	// ProviderName names the provider in telemetry.
	ProviderName string `json:"providerName,omitempty"`
}

// NamedProviderConfig is one of several model endpoints of a session. Printing it shows neither key, token nor header values.
type NamedProviderConfig struct {
	// Name is required, unique, and has no "/".
	Name string `json:"name,required"`
	// Type is "openai" (the default), "azure" or "anthropic".
	Type string `json:"type,omitempty"`
	// WireAPI is "completions" (the default) or "responses".
	WireAPI string `json:"wireApi,omitempty"`
	// Transport is "http" (the default) or "websockets".
	Transport string `json:"transport,omitempty"`
	// BaseURL is the endpoint, to which the server adds the path of the API: "http://localhost:8080/v1" becomes
	// http://localhost:8080/v1/chat/completions. Required.
	BaseURL string `json:"baseUrl,required"`
	// APIKey is a static key.
	APIKey string `json:"apiKey,omitempty,secret"`
	// BearerToken is a static token; it wins over APIKey.
	BearerToken string `json:"bearerToken,omitempty,secret"`
	// BearerTokenProvider is called before every model request, with the provider's name; it should cache. The token comes
	// without "Bearer ".
	BearerTokenProvider func(ctx context.Context, provider string) (string, error) `json:"hasBearerTokenProvider,omitempty"`
	// Azure holds what only Azure needs.
	Azure *AzureOptions `json:"azure,omitempty"`
	// Headers are added to every model request.
	Headers map[string]string `json:"headers,omitempty,secret"`
}

// AzureOptions are the Azure part of a provider.
type AzureOptions struct {
	APIVersion string `json:"apiVersion,omitempty"`
}

// ProviderModelConfig is a model of one of [SessionConfig.Providers]. Select it as "provider/id".
type ProviderModelConfig struct {
	// ID is required and unique within its provider.
	ID string `json:"id,required"`
	// Provider is the name of its provider; required.
	Provider string `json:"provider,required"`
	// WireModel is the model name sent to the endpoint; "" means ID.
	WireModel string `json:"wireModel,omitempty"`
	// ModelID is a well-known model whose limits and behaviour are assumed; "" means ID.
	ModelID string `json:"modelId,omitempty"`
	// Name is shown to people; "" means "provider/id".
	Name string `json:"name,omitempty"`
	// MaxPromptTokens limits the prompt, in tokens; 0 is unset.
	MaxPromptTokens int64 `json:"maxPromptTokens,omitempty"`
	// MaxContextWindowTokens is the size of the context window, in tokens; 0 is unset.
	MaxContextWindowTokens int64 `json:"maxContextWindowTokens,omitempty"`
	// MaxOutputTokens limits one answer, in tokens; 0 is unset.
	MaxOutputTokens int64 `json:"maxOutputTokens,omitempty"`
	// Capabilities overrides what ModelID implies.
	Capabilities *ModelCapabilities `json:"capabilities,omitempty"`
	// SystemMessage is used with this model.
	SystemMessage *SystemMessage `json:"systemMessage,omitempty"`
	// Metadata is handed through to the model list.
	Metadata map[string]any `json:"metadata,omitempty"`
}

// ModelCapabilities is what a model can do. As an override, nil members leave the server's knowledge alone.
type ModelCapabilities struct {
	Supports *ModelSupports `json:"supports,omitempty"`
	Limits   *ModelLimits   `json:"limits,omitempty"`
}

// ModelSupports lists features of a model.
type ModelSupports struct {
	Vision          *bool `json:"vision,omitempty"`
	ToolCalls       *bool `json:"toolCalls,omitempty"`
	ReasoningEffort *bool `json:"reasoningEffort,omitempty"`
	// AdaptiveThinking is "unsupported", "optional", "required" or "adaptive_only".
	AdaptiveThinking string `json:"adaptive_thinking,omitempty"`
}

// ModelLimits are limits of a model, in tokens.
type ModelLimits struct {
	MaxPromptTokens        *int64             `json:"max_prompt_tokens,omitempty"`
	MaxOutputTokens        *int64             `json:"max_output_tokens,omitempty"`
	MaxContextWindowTokens *int64             `json:"max_context_window_tokens,omitempty"`
	Vision                 *ModelVisionLimits `json:"vision,omitempty"`
}

// ModelVisionLimits are limits on images.
type ModelVisionLimits struct {
	// SupportedMediaTypes are MIME types.
	SupportedMediaTypes []string `json:"supported_media_types,omitempty"`
	// MaxPromptImages counts images in one prompt.
	MaxPromptImages *int64 `json:"max_prompt_images,omitempty"`
	// MaxPromptImageSize is in bytes.
	MaxPromptImageSize *int64 `json:"max_prompt_image_size,omitempty"`
}

// CAPIOptions tunes the use of the Copilot API.
type CAPIOptions struct {
	// EnableWebSocketResponses false forces plain HTTP.
	EnableWebSocketResponses *bool `json:"enableWebSocketResponses,omitempty"`
	// AutoTier steers the model "auto": "efficiency", "balance", "intelligence" or "fast".
	AutoTier string `json:"autoTier,omitempty"`
}

// SystemMessage changes the system prompt.
type SystemMessage struct {
	// Mode is "append" (the default), "replace" or "customize". With Sections it may be left empty and means "customize".
	Mode string `json:"mode,omitempty"`
	// Content is appended to the prompt or, with "replace", takes its place.
	Content string `json:"content,omitempty"`
	// Sections changes parts of the prompt by id, such as "identity", "tone", "guidelines", "safety" or "environment_context".
	Sections map[string]SystemSection `json:"sections,omitempty"`
}

// SystemSection changes one section of the system prompt.
type SystemSection struct {
	// Action is "replace", "remove", "append", "prepend" or "preserve"; "transform" is set by [SessionConfig.Transforms].
	Action string `json:"action,omitempty"`
	// Content goes with "replace", "append" and "prepend".
	Content string `json:"content,omitempty"`
}

// ToolSearch lets the model search for tools.
type ToolSearch struct {
	Enabled *bool `json:"enabled,omitempty"`
	// DeferThreshold is how many tools there must be; unset means 30.
	DeferThreshold *int `json:"deferThreshold,omitempty"`
}

// MCPServerConfig tells the server how to reach an MCP server: a program (Command) or an address (URL).
// Printing it shows neither environment nor header values; Args and URL are shown.
type MCPServerConfig struct {
	// Type is "stdio" ("local" is the same) for a program, "http" or "sse" for an address. Empty means "stdio", or "http" when
	// only URL is given.
	Type string `json:"type,omitempty"`
	// Tools are the tools to use; nil means all, an empty list none.
	Tools []string `json:"tools,omitempty"`
	// Timeout bounds listing and calling tools, in whole milliseconds; 0 is unset.
	Timeout time.Duration `json:"timeout,omitempty"`

	// Command is the program.
	Command string `json:"command,omitempty"`
	// Args are its arguments.
	Args []string `json:"args,omitempty"`
	// Env is added to its environment, values taken literally.
	Env map[string]string `json:"env,omitempty,secret"`
	// CWD is its working directory.
	CWD string `json:"cwd,omitempty"`

	// URL is the address.
	URL string `json:"url,omitempty"`
	// Headers are sent with every request.
	Headers map[string]string `json:"headers,omitempty,secret"`

	// Extra holds further members that the server knows, such as "oauthClientId".
	Extra map[string]json.RawMessage `json:"-"`
}

// GitHubMCPToolConfig chooses what GitHub's MCP server offers.
type GitHubMCPToolConfig struct {
	EnableAllTools      *bool    `json:"enableAllTools,omitempty"`
	AdditionalToolsets  []string `json:"additionalToolsets,omitempty"`
	AdditionalTools     []string `json:"additionalTools,omitempty"`
	EnableInsidersMode  *bool    `json:"enableInsidersMode,omitempty"`
	DisableFormDeferral *bool    `json:"disableFormDeferral,omitempty"`
}

// Diagnostics sets how much the server reports, by source; "mcp" is one.
type Diagnostics struct {
	Sources map[string]DiagnosticSource `json:"sources"`
}

// DiagnosticSource is the setting of one source.
type DiagnosticSource struct {
	// Level is "off", "error", "warning", "info", "debug" or "trace".
	Level string `json:"level,required"`
}

// CustomAgent is an agent of the host's own. Printing it shows no secret of MCPServers.
type CustomAgent struct {
	// Name is required.
	Name string `json:"name,required"`
	// Prompt is its system prompt; required.
	Prompt      string `json:"prompt,required"`
	DisplayName string `json:"displayName,omitempty"`
	// Description tells the model when to use it.
	Description string `json:"description,omitempty"`
	// Tools it may use; nil means all, an empty list none.
	Tools []string `json:"tools,omitempty"`
	// MCPServers are servers for this agent alone.
	MCPServers map[string]MCPServerConfig `json:"mcpServers,omitempty"`
	// Infer lets the model choose the agent by itself.
	Infer *bool `json:"infer,omitempty"`
	// Skills are loaded with it.
	Skills          []string `json:"skills,omitempty"`
	Model           string   `json:"model,omitempty"`
	ReasoningEffort string   `json:"reasoningEffort,omitempty"`
}

// DefaultAgent changes the agent that answers when no custom one is active.
type DefaultAgent struct {
	// ExcludedTools are hidden from it, and not from others.
	ExcludedTools []string `json:"excludedTools,omitempty"`
}

// InfiniteSessions sets when a conversation is compacted. Thresholds are parts of the context window, 0 to 1.
type InfiniteSessions struct {
	// Enabled is true when unset.
	Enabled *bool `json:"enabled,omitempty"`
	// BackgroundCompactionThreshold starts a compaction beside the turn; unset means 0.80.
	BackgroundCompactionThreshold *float64 `json:"backgroundCompactionThreshold,omitempty"`
	// BufferExhaustionThreshold holds the turn until compaction is done; unset means 0.95.
	BufferExhaustionThreshold *float64 `json:"bufferExhaustionThreshold,omitempty"`
}

// LargeOutput moves long tool output to files.
type LargeOutput struct {
	// Enabled is true when unset.
	Enabled *bool `json:"enabled,omitempty"`
	// MaxSizeBytes is the longest output that stays inline, in bytes; unset means 50 KiB.
	MaxSizeBytes *int64 `json:"maxSizeBytes,omitempty"`
	// OutputDir takes the files; "" means the system's temporary directory.
	OutputDir string `json:"outputDir,omitempty"`
}

// Memory turns memories on or off.
type Memory struct {
	Enabled bool `json:"enabled"`
	// Mode is "system-prompt" or "user-prompt".
	Mode string `json:"mode,omitempty"`
}

// SessionLimits bounds what a session may spend.
type SessionLimits struct {
	// MaxAICredits is the budget in AI credits, at least 30; 0 is unset.
	MaxAICredits float64 `json:"maxAiCredits,omitempty"`
}

// ManagedSettings is policy set by the host.
type ManagedSettings struct {
	Permissions *ManagedPermissions `json:"permissions,omitempty"`
}

// ManagedPermissions are permission rules that users cannot lift.
type ManagedPermissions struct {
	// DisableBypassPermissionsMode is "disable" or "allow-auto-only".
	DisableBypassPermissionsMode string   `json:"disableBypassPermissionsMode,omitempty"`
	Deny                         []string `json:"deny,omitempty"`
	Ask                          []string `json:"ask,omitempty"`
	Allow                        []string `json:"allow,omitempty"`
}

// CloudOptions creates a session on GitHub's computers.
type CloudOptions struct {
	Repository *CloudRepository `json:"repository,omitempty"`
}

// CloudRepository is the repository a cloud session works on.
type CloudRepository struct {
	Owner  string `json:"owner,required"`
	Name   string `json:"name,required"`
	Branch string `json:"branch,omitempty"`
}

// CanvasDeclaration is a canvas that the host can show.
type CanvasDeclaration struct {
	ID          string `json:"id,required"`
	DisplayName string `json:"displayName,required"`
	Description string `json:"description,required"`
	// InputSchema is the JSON Schema of what opening it takes.
	InputSchema json.RawMessage `json:"inputSchema,omitempty"`
	Actions     []CanvasAction  `json:"actions,omitempty"`
	// Open shows an instance of the canvas. Without it the canvas is only declared: "canvas.open" and its kin are for Handlers.
	Open func(ctx context.Context, call CanvasCall) (CanvasView, error) `json:"-"`
	// Close is told that an instance is no longer wanted; it may be nil.
	Close func(ctx context.Context, call CanvasCall) error `json:"-"`
}

// CanvasAction is something a canvas can be asked to do.
type CanvasAction struct {
	Name        string `json:"name,required"`
	Description string `json:"description,omitempty"`
	// InputSchema is the JSON Schema of its input.
	InputSchema json.RawMessage `json:"inputSchema,omitempty"`
	// Handler runs it. The result must encode as JSON.
	Handler func(ctx context.Context, call CanvasCall) (any, error) `json:"-"`
}

// CanvasProvider is a stable owner of canvases.
type CanvasProvider struct {
	// ID is required; the prefix "connection:" is reserved.
	ID   string `json:"id,required"`
	Name string `json:"name,omitempty"`
}

// OpenCanvas is a canvas that is open.
type OpenCanvas struct {
	InstanceID    string          `json:"instanceId,required"`
	ExtensionID   string          `json:"extensionId,required"`
	CanvasID      string          `json:"canvasId,required"`
	ExtensionName string          `json:"extensionName,omitempty"`
	Icon          string          `json:"icon,omitempty"`
	Title         string          `json:"title,omitempty"`
	Status        string          `json:"status,omitempty"`
	URL           string          `json:"url,omitempty"`
	Input         json.RawMessage `json:"input,omitempty"`
}

// ExtensionInfo identifies an extension.
type ExtensionInfo struct {
	Source string `json:"source,required"`
	Name   string `json:"name,required"`
}

// IsolatedTools returns the built-in tools that touch nothing outside their session, ready for
// [SessionConfig.AvailableTools]. The caller owns the list.
func IsolatedTools() []string {
	return []string{
		"builtin:ask_user", "builtin:task_complete", "builtin:exit_plan_mode", "builtin:task", "builtin:read_agent",
		"builtin:write_agent", "builtin:list_agents", "builtin:send_inbox", "builtin:context_board", "builtin:skill",
	}
}

// handlers are the functions that c has for the agent's requests.
func (c *SessionConfig) handlers() handlers {
	h := handlers{
		permission:     c.OnPermission,
		managed:        c.ManagedSettings != nil || c.EnableManagedSettings != nil && *c.EnableManagedSettings,
		userInput:      c.OnUserInput,
		elicitation:    c.OnElicitation,
		exitPlanMode:   c.OnExitPlanMode,
		autoModeSwitch: c.OnAutoModeSwitch,
		mcpAuth:        c.OnMCPAuth,
		sampling:       c.OnSampling,
		hook:           c.OnHook,
		transforms:     maps.Clone(c.Transforms),
		custom:         maps.Clone(c.Handlers),
	}
	if c.Hooks != nil {
		h.hooks = *c.Hooks
	}
	if len(c.Tools) > 0 {
		h.tools = make(map[string]ToolHandler)
	}
	for _, t := range c.Tools {
		if t.Handler != nil {
			h.tools[t.Name] = t.Handler
		}
	}
	if len(c.Commands) > 0 {
		h.commands = make(map[string]func(context.Context, CommandCall) error)
	}
	for _, cmd := range c.Commands {
		h.commands[cmd.Name] = cmd.Handler
	}
	return h
}

// hosting collects what cfg brings for the session with this id. Errors match ErrInvalidConfig.
func (c *Client) hosting(id string, cfg *SessionConfig) (*hosted, error) {
	h := &hosted{
		files:        cfg.SessionFS,
		registration: cfg.GitHubTokenProviderRegistrationID,
		gitHubToken:  cfg.GitHubTokenProvider,
	}
	if len(cfg.Canvases) > 0 {
		h.canvases = make(map[string]CanvasDeclaration)
	}
	for _, canvas := range cfg.Canvases {
		canvas.Actions = slices.Clone(canvas.Actions)
		h.canvases[canvas.ID] = canvas
	}
	if cfg.Provider != nil || len(cfg.Providers) > 0 {
		h.tokens = make(map[string]func(context.Context, string) (string, error))
	}
	if cfg.Provider != nil && cfg.Provider.BearerTokenProvider != nil {
		h.tokens["default"] = cfg.Provider.BearerTokenProvider
	}
	for _, p := range cfg.Providers {
		if p.BearerTokenProvider != nil {
			h.tokens[p.Name] = p.BearerTokenProvider
		}
	}
	declared := c.opts.SessionFS
	if declared == nil {
		if h.files != nil {
			return nil, invalid("SessionFS", "the client's options declare none")
		}
		return h, nil
	}
	if h.files == nil && declared.New != nil {
		h.files = declared.New(id)
	}
	if h.files == nil {
		return nil, invalid("SessionFS", "missing: the client's options declare it")
	}
	if _, ok := h.files.(SessionSQLite); declared.SQLite && !ok {
		return nil, invalid("SessionFS", "is no SessionSQLite: the client's options declare SQLite")
	}
	return h, nil
}

// startKind is the request a configuration is encoded for.
type startKind int

const (
	startCreate startKind = iota // session.create
	startResume                  // session.resume
)

// encodedConfig is what a start writes. Keep it behind a pointer: package fmt must not reach the secrets inside.
type encodedConfig struct {
	params json.RawMessage // of session.create or session.resume, complete but for the trace context
	update json.RawMessage // of the session.options.update that follows, without sessionId; nil when none is needed

	secrets []string // in them, as of secretsOf
}

// startParams are the params of both requests. The configuration stands last, since its Extra yields to every other member.
type startParams struct {
	SessionID                       string `json:"sessionId,omitempty"`
	EnvValueMode                    string `json:"envValueMode"`
	ToolFilterPrecedence            string `json:"toolFilterPrecedence"`
	HasHooks                        bool   `json:"hooks"`
	EnableGitHubTelemetryForwarding bool   `json:"enableGitHubTelemetryForwarding,omitempty"`
	*SessionConfig
}

// optionsUpdate are the params of session.options.update.
type optionsUpdate struct {
	SkipCustomInstructions *bool    `json:"skipCustomInstructions,omitempty"`
	CustomAgentsLocalOnly  *bool    `json:"customAgentsLocalOnly,omitempty"`
	CoauthorEnabled        *bool    `json:"coauthorEnabled,omitempty"`
	ManageScheduleEnabled  *bool    `json:"manageScheduleEnabled,omitempty"`
	InstalledPlugins       []string `json:"installedPlugins,omitempty"`
	IncludedBuiltinSkills  []string `json:"includedBuiltinSkills,omitempty"`
}

// encode checks c and writes it down. id is the session's, empty only where the server will choose. c may be nil and is not
// changed; the result shares nothing with it. Errors match ErrInvalidConfig and name the field.
func (c *SessionConfig) encode(kind startKind, id string, o *Options) (*encodedConfig, error) {
	if c == nil {
		c = &SessionConfig{}
	}
	if o == nil {
		o = &Options{}
	}
	cfg := *c // shallow: what is changed below is replaced, never written through
	if err := cfg.validate(kind, id); err != nil {
		return nil, err
	}
	empty := o.Mode == ModeEmpty
	if empty {
		if cfg.AvailableTools == nil {
			return nil, invalid("AvailableTools", "empty mode needs a list, which may be empty")
		}
		cfg.setEmptyDefaults()
	}
	if err := cfg.normalize(empty); err != nil {
		return nil, err
	}

	e := encoder{path: []string{"SessionConfig"}, refuse: "resume"}
	if kind == startResume {
		e.refuse = "create"
	}
	params, err := e.encode(startParams{
		SessionID:                       id,
		EnvValueMode:                    "direct",
		ToolFilterPrecedence:            "excluded",
		HasHooks:                        cfg.OnHook != nil || cfg.Hooks != nil && !reflect.ValueOf(*cfg.Hooks).IsZero(),
		EnableGitHubTelemetryForwarding: o.OnGitHubTelemetry != nil,
		SessionConfig:                   &cfg,
	})
	if err != nil {
		return nil, err
	}
	update, err := c.encodeUpdate(empty)
	if err != nil {
		return nil, err
	}
	return &encodedConfig{params: params, update: update, secrets: hidden(e.secrets)}, nil
}

// encodeUpdate returns the options that are set by a call of their own after the start, nil when there is none.
func (c *SessionConfig) encodeUpdate(empty bool) (json.RawMessage, error) {
	u := optionsUpdate{
		SkipCustomInstructions: c.SkipCustomInstructions,
		CustomAgentsLocalOnly:  c.CustomAgentsLocalOnly,
		CoauthorEnabled:        c.CoauthorEnabled,
		ManageScheduleEnabled:  c.ManageScheduleEnabled,
	}
	if empty {
		u.SkipCustomInstructions = or(u.SkipCustomInstructions, true)
		u.CustomAgentsLocalOnly = or(u.CustomAgentsLocalOnly, true)
		u.CoauthorEnabled = or(u.CoauthorEnabled, false)
		u.ManageScheduleEnabled = or(u.ManageScheduleEnabled, false)
		u.InstalledPlugins, u.IncludedBuiltinSkills = []string{}, []string{}
	}
	if reflect.ValueOf(u).IsZero() {
		return nil, nil
	}
	return encodeWire(u)
}

// setEmptyDefaults turns off what reaches outside the session, where the caller has not said otherwise.
func (c *SessionConfig) setEmptyDefaults() {
	c.EnableSessionTelemetry = or(c.EnableSessionTelemetry, false)
	c.SkipEmbeddingRetrieval = or(c.SkipEmbeddingRetrieval, true)
	c.EmbeddingCacheStorage = cmp.Or(c.EmbeddingCacheStorage, "in-memory")
	c.EnableOnDemandInstructionDiscovery = or(c.EnableOnDemandInstructionDiscovery, false)
	c.EnableFileHooks = or(c.EnableFileHooks, false)
	c.EnableHostGitOperations = or(c.EnableHostGitOperations, false)
	c.EnableSessionStore = or(c.EnableSessionStore, false)
	c.EnableSkills = or(c.EnableSkills, false)
	c.Memory = or(c.Memory, Memory{})
	c.MCPOAuthTokenStorage = cmp.Or(c.MCPOAuthTokenStorage, "in-memory")
	c.CustomAgentsLocalOnly = or(c.CustomAgentsLocalOnly, true)
	c.IsExperimentalMode = or(c.IsExperimentalMode, false)
}

// or returns p, or a pointer to def where p is nil.
func or[T any](p *T, def T) *T {
	if p == nil {
		return &def
	}
	return p
}

// validate refuses what the server would take without a word, or what it could only answer after the session exists.
func (c *SessionConfig) validate(kind startKind, id string) error {
	switch {
	case kind == startResume && id == "":
		return invalid("SessionID", "missing")
	case id != "" && (!isName(id) || len(id) > 250):
		return invalid("SessionID", "must be 1 to 250 characters out of A-Z, a-z, 0-9, _ and -")
	case c.SessionID != "" && c.SessionID != id:
		return invalid("SessionID", "differs from the id to resume")
	case c.EventBuffer < 0:
		return invalid("EventBuffer", "%d is negative", c.EventBuffer)
	case c.Provider != nil && (len(c.Providers) > 0 || len(c.Models) > 0):
		return invalid("Provider", "excludes Providers and Models")
	case c.GitHubToken != "" && c.GitHubTokenProviderRegistrationID != "":
		return invalid("GitHubToken", "excludes GitHubTokenProvider and GitHubTokenProviderRegistrationID")
	case c.CanvasProvider != nil && strings.HasPrefix(c.CanvasProvider.ID, "connection:"):
		return invalid("CanvasProvider.ID", `the prefix "connection:" is reserved`)
	}
	if err := checkToolFilter("AvailableTools", c.AvailableTools); err != nil {
		return err
	}
	if err := checkToolFilter("ExcludedTools", c.ExcludedTools); err != nil {
		return err
	}

	names := make(map[string]bool)
	for i, t := range c.Tools {
		switch {
		case !isName(t.Name):
			return invalid(fmt.Sprintf("Tools[%d].Name", i), "%.64q is not made of A-Z, a-z, 0-9, _ and -", t.Name)
		case names[t.Name]:
			return invalid(fmt.Sprintf("Tools[%d].Name", i), "%.64q is there twice", t.Name)
		case t.Defer != "" && t.Defer != "auto" && t.Defer != "never":
			return invalid(fmt.Sprintf("Tools[%d].Defer", i), `%.64q is neither "auto" nor "never"`, t.Defer)
		}
		names[t.Name] = true
	}
	clear(names)
	for i, cmd := range c.Commands {
		switch {
		case cmd.Name == "" || strings.HasPrefix(cmd.Name, "/") || strings.ContainsAny(cmd.Name, " \t\r\n"):
			return invalid(fmt.Sprintf("Commands[%d].Name", i), "%.64q is empty, or has a slash or a blank", cmd.Name)
		case names[cmd.Name]:
			return invalid(fmt.Sprintf("Commands[%d].Name", i), "%.64q is there twice", cmd.Name)
		case cmd.Handler == nil:
			return invalid(fmt.Sprintf("Commands[%d].Handler", i), "missing")
		}
		names[cmd.Name] = true
	}
	clear(names)
	for i, p := range c.Providers {
		switch {
		case strings.Contains(p.Name, "/"):
			return invalid(fmt.Sprintf("Providers[%d].Name", i), "%.64q has a slash", p.Name)
		case names[p.Name]:
			return invalid(fmt.Sprintf("Providers[%d].Name", i), "%.64q is there twice", p.Name)
		}
		names[p.Name] = true
	}
	for method, h := range c.Handlers {
		if method == "" || h == nil {
			return invalid("Handlers", "%.64q has no method or no handler", method)
		}
	}
	return nil
}

// checkToolFilter refuses entries that match no tool, which the server would accept.
func checkToolFilter(field string, list []string) error {
	for i, s := range list {
		name := s
		for _, source := range []string{"builtin:", "mcp:", "custom:"} {
			name = strings.TrimPrefix(name, source)
		}
		if name == "" || s == "*" {
			return invalid(fmt.Sprintf("%s[%d]", field, i), `%.64q names no tool; all of a source are "builtin:*", "mcp:*", "custom:*"`, s)
		}
	}
	return nil
}

// isName reports whether s has the syntax of tool names and session ids.
func isName(s string) bool {
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c != '_' && c != '-' && (c < '0' || c > '9') && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') {
			return false
		}
	}
	return s != ""
}

// normalize puts in what the caller may leave out.
func (c *SessionConfig) normalize(empty bool) (err error) {
	c.IncludeSubAgentStreamingEvents = or(c.IncludeSubAgentStreamingEvents, true)
	if c.WorkingDirectory != "" {
		if c.WorkingDirectory, err = filepath.Abs(c.WorkingDirectory); err != nil {
			return invalid("WorkingDirectory", "%w", err)
		}
	}
	if c.SystemMessage, err = c.systemMessage(empty); err != nil {
		return err
	}
	c.Tools = slices.Clone(c.Tools)
	for i := range c.Tools {
		t := &c.Tools[i]
		if t.Parameters, err = toolSchema(t.Parameters); err != nil {
			return invalid(fmt.Sprintf("Tools[%d].Parameters", i), "of %.64q: %w", t.Name, err)
		}
	}
	if c.MCPServers, err = normalServers("MCPServers", c.MCPServers); err != nil {
		return err
	}
	c.CustomAgents = slices.Clone(c.CustomAgents)
	for i := range c.CustomAgents {
		a := &c.CustomAgents[i]
		if a.MCPServers, err = normalServers(fmt.Sprintf("CustomAgents[%d].MCPServers", i), a.MCPServers); err != nil {
			return err
		}
	}
	return nil
}

// systemMessage returns what is sent as such: the caller's, the sections that Transforms asks for and, in empty mode, the
// removal of the section that describes the host. Nil when there is nothing to say.
func (c *SessionConfig) systemMessage(empty bool) (*SystemMessage, error) {
	if c.SystemMessage == nil && len(c.Transforms) == 0 && !empty {
		return nil, nil
	}
	m := *or(c.SystemMessage, SystemMessage{})
	switch m.Mode {
	case "", "append", "replace", "customize":
	default:
		return nil, invalid("SystemMessage.Mode", `%.64q is none of "append", "replace", "customize"`, m.Mode)
	}
	if len(m.Sections) > 0 && m.Mode != "" && m.Mode != "customize" {
		return nil, invalid("SystemMessage.Sections", "only count with Mode customize, not %s", m.Mode)
	}
	if len(c.Transforms) > 0 && m.Mode == "replace" {
		return nil, invalid("Transforms", "have no section to work on when SystemMessage.Mode is replace")
	}
	for id, s := range m.Sections {
		switch s.Action {
		case "", "replace", "remove", "append", "prepend", "preserve", "transform":
		default:
			return nil, invalid(fmt.Sprintf("SystemMessage.Sections[%.64q].Action", id), "%.64q is unknown", s.Action)
		}
	}

	sections := make(map[string]SystemSection)
	for id, f := range c.Transforms {
		if id == "" || f == nil {
			return nil, invalid("Transforms", "%.64q has no section id or no function", id)
		}
		sections[id] = SystemSection{Action: "transform"}
	}
	if _, ok := sections["environment_context"]; !ok && empty && m.Mode != "replace" {
		sections["environment_context"] = SystemSection{Action: "remove"}
	}
	maps.Copy(sections, m.Sections)
	if len(sections) > 0 {
		m.Mode, m.Sections = "customize", sections
	}
	return &m, nil
}

// normalServers returns a copy of the map in which every server has its type and what that type needs.
func normalServers(field string, servers map[string]MCPServerConfig) (map[string]MCPServerConfig, error) {
	servers = maps.Clone(servers)
	for name, s := range servers {
		at := fmt.Sprintf("%s[%.64q]", field, name)
		if s.Type == "" {
			s.Type = "stdio"
			if s.Command == "" && s.URL != "" {
				s.Type = "http"
			}
			servers[name] = s
		}
		local, remote := s.Type == "stdio" || s.Type == "local", s.Type == "http" || s.Type == "sse"
		switch {
		case name == "":
			return nil, invalid(at, "a server needs a name")
		case local && s.Command == "":
			return nil, invalid(at+".Command", "missing")
		case local && s.URL != "":
			return nil, invalid(at+".URL", "not for type %s", s.Type)
		case remote && s.URL == "":
			return nil, invalid(at+".URL", "missing")
		case remote && s.Command != "":
			return nil, invalid(at+".Command", "not for type %s", s.Type)
		case s.Timeout < 0:
			return nil, invalid(at+".Timeout", "%v is negative", s.Timeout)
		}
	}
	return servers, nil
}

// toolSchema returns the schema that declares a tool's arguments. Providers refuse a tool without type and properties, and
// any "required" that is null, which is how package encoding/json writes a nil list.
func toolSchema(v any) (json.RawMessage, error) {
	raw, err := plainJSON(v)
	if err != nil {
		return nil, err
	}
	if string(raw) == "null" {
		raw = json.RawMessage("{}")
	}
	if raw[0] != '{' {
		return nil, errors.New("the schema is not a JSON object")
	}
	var e encoder
	if err := e.schema(raw, true); err != nil {
		return nil, err
	}
	return e.buf.Bytes(), nil
}

// plainJSON returns v, a value of the caller's own, as compact JSON.
func plainJSON(v any) (json.RawMessage, error) {
	if raw, ok := v.(json.RawMessage); ok && len(raw) == 0 {
		v = nil
	}
	var e encoder
	err := e.std(v)
	return e.buf.Bytes(), err
}

// schema writes raw, whose order it keeps, without nulls that stand for nothing. top completes the outermost object.
func (e *encoder) schema(raw json.RawMessage, top bool) error {
	if raw[0] == '[' {
		var list []json.RawMessage
		if err := json.Unmarshal(raw, &list); err != nil {
			return err
		}
		e.buf.WriteByte('[')
		for _, item := range list {
			e.comma('[')
			if err := e.schema(item, false); err != nil {
				return err
			}
		}
		e.buf.WriteByte(']')
		return nil
	}
	if raw[0] != '{' {
		e.buf.Write(raw)
		return nil
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	if _, err := dec.Token(); err != nil {
		return err
	}
	var keys []string
	var values []json.RawMessage
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return err
		}
		var value json.RawMessage
		if err := dec.Decode(&value); err != nil {
			return err
		}
		k := key.(string) // a member's name is one
		if string(value) == "null" && (k == "required" || top && (k == "type" || k == "properties")) {
			continue
		}
		keys, values = append(keys, k), append(values, value)
	}
	if top && !slices.Contains(keys, "type") {
		keys, values = slices.Insert(keys, 0, "type"), slices.Insert(values, 0, json.RawMessage(`"object"`))
	}
	if top && !slices.Contains(keys, "properties") {
		keys, values = append(keys, "properties"), append(values, json.RawMessage("{}"))
	}
	e.buf.WriteByte('{')
	for i, k := range keys {
		e.comma('{')
		if err := e.std(k); err != nil {
			return err
		}
		e.buf.WriteByte(':')
		if err := e.schema(values[i], false); err != nil {
			return err
		}
	}
	e.buf.WriteByte('}')
	return nil
}

// encoder writes configuration as JSON. It follows the json tags as package encoding/json does, with these differences:
// "omitempty" leaves out unset values only, so that an empty list is sent; nil lists and maps are [] and {}; a
// [time.Duration] is whole milliseconds; a function is the fact that it is set; HTML is not escaped; an Extra map adds
// members. Further options of a tag: "secret" is a value that people must not see, "required" must not be zero, "create" and
// "resume" are known to that request only.
//
// The same walk writes for the wire, prints for people, and lists the secrets, so that a new field cannot be safe in one
// of the three alone. It does not use the MarshalJSON of this package's types, which hides secrets.
type encoder struct {
	buf     bytes.Buffer
	path    []string // to the field being written, for errors
	refuse  string   // the option of members that the request does not know
	mask    bool     // for people: hide secrets, demand nothing
	secrets []string // met so far
	names   []string // of the members that the object being written has, behind those of the objects around it
}

// redacted stands for a secret in text for people.
const redacted = "[redacted]"

// encodeWire returns v as JSON for the server, secrets included. It is for every value of this package that has a secret.
func encodeWire(v any) (json.RawMessage, error) {
	var e encoder
	return e.encode(v)
}

// encode returns v as JSON; its errors match ErrInvalidConfig and name the field.
func (e *encoder) encode(v any) (json.RawMessage, error) {
	if v == nil {
		return json.RawMessage("null"), nil
	}
	e.buf.Grow(512)
	e.names = make([]string, 0, 16)
	if err := e.value(reflect.ValueOf(v), false); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrInvalidConfig, strings.ReplaceAll(strings.Join(e.path, "."), ".[", "["), err)
	}
	return e.buf.Bytes(), nil
}

func (e *encoder) value(v reflect.Value, secret bool) error {
	t := v.Type()
	switch {
	case t == reflect.TypeFor[time.Duration]():
		ms := v.Int() / int64(time.Millisecond)
		if v.Int()%int64(time.Millisecond) > 0 {
			ms++ // a short limit must not become none
		}
		return e.std(ms)
	case t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.Uint8:
		if secret && e.mask {
			return e.std(redacted)
		}
		return e.std(v.Interface())
	}
	switch t.Kind() {
	case reflect.Func:
		e.buf.WriteString(strconv.FormatBool(!v.IsNil()))
		return nil
	case reflect.Pointer:
		if v.IsNil() {
			return e.std(nil)
		}
		return e.value(v.Elem(), secret)
	case reflect.Struct:
		if t.PkgPath() != reflect.TypeFor[encoder]().PkgPath() {
			return e.std(v.Interface())
		}
		outer := len(e.names)
		e.buf.WriteByte('{')
		if err := e.members(v, outer); err != nil {
			return err
		}
		e.buf.WriteByte('}')
		e.names = e.names[:outer]
		return nil
	case reflect.Slice:
		e.buf.WriteByte('[')
		for i := range v.Len() {
			e.comma('[')
			if err := e.at(fmt.Sprintf("[%d]", i), v.Index(i), secret); err != nil {
				return err
			}
		}
		e.buf.WriteByte(']')
		return nil
	case reflect.Map:
		keys := v.MapKeys()
		slices.SortFunc(keys, func(a, b reflect.Value) int { return cmp.Compare(a.String(), b.String()) })
		e.buf.WriteByte('{')
		for _, k := range keys {
			e.comma('{')
			if err := e.std(k.String()); err != nil {
				return err
			}
			e.buf.WriteByte(':')
			if err := e.at(fmt.Sprintf("[%.64q]", k.String()), v.MapIndex(k), secret); err != nil {
				return err
			}
		}
		e.buf.WriteByte('}')
		return nil
	case reflect.String:
		if secret && v.Len() > 0 {
			e.secrets = append(e.secrets, v.String())
			if e.mask {
				return e.std(redacted)
			}
		}
		if plain(v.String()) {
			e.buf.Write(appendQuoted(e.buf.AvailableBuffer(), v.String()))
			return nil
		}
	case reflect.Bool:
		e.buf.WriteString(strconv.FormatBool(v.Bool()))
		return nil
	}
	return e.std(v.Interface())
}

// fieldPlan is what the encoder has to know of a struct's field.
type fieldPlan struct {
	index                       int
	field, name                 string // in Go and on the wire
	key                         string // the quoted name and the colon
	only                        string // the one request that knows it, "" when all do
	embedded, extra             bool
	omitempty, secret, required bool
}

// plans holds the fields of the struct types that were met. It is a cache: what it says of a type never changes.
var plans sync.Map // reflect.Type to []fieldPlan

func planOf(t reflect.Type) []fieldPlan {
	if known, ok := plans.Load(t); ok {
		return known.([]fieldPlan)
	}
	var plan []fieldPlan
	for i := range t.NumField() {
		f := t.Field(i)
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		if !f.Anonymous && (!f.IsExported() || name == "-" && f.Name != "Extra") {
			continue
		}
		name = cmp.Or(name, f.Name)
		p := fieldPlan{
			index: i, field: f.Name, name: name, key: strconv.Quote(name) + ":",
			embedded: f.Anonymous, extra: f.Name == "Extra",
			omitempty: tagHas(options, "omitempty"), secret: tagHas(options, "secret"), required: tagHas(options, "required"),
		}
		for _, request := range []string{"create", "resume"} {
			if tagHas(options, request) {
				p.only = request
			}
		}
		plan = append(plan, p)
	}
	plans.Store(t, plan)
	return plan
}

// members writes the fields of the struct v; the names of the object's members begin at outer.
func (e *encoder) members(v reflect.Value, outer int) error {
	for _, f := range planOf(v.Type()) {
		fv := v.Field(f.index)
		switch {
		case f.embedded:
			if err := e.members(reflect.Indirect(fv), outer); err != nil {
				return err
			}
			continue
		case f.extra:
			if err := e.extra(fv.Interface().(map[string]json.RawMessage), outer); err != nil {
				return err
			}
			continue
		}
		zero := fv.IsZero()
		if zero && f.omitempty {
			continue
		}
		e.path = append(e.path, f.field)
		switch {
		case e.mask:
		case zero && f.required:
			return errors.New("missing")
		case e.refuse != "" && e.refuse == f.only:
			return fmt.Errorf("only %s takes it", e.refuse)
		}
		e.names = append(e.names, f.name)
		e.comma('{')
		e.buf.WriteString(f.key)
		if err := e.value(fv, f.secret); err != nil {
			return err
		}
		e.path = e.path[:len(e.path)-1]
	}
	return nil
}

// tagHas reports whether a tag's options, separated by commas, include this one.
func tagHas(options, name string) bool {
	for options != "" {
		var option string
		if option, options, _ = strings.Cut(options, ","); option == name {
			return true
		}
	}
	return false
}

// extra writes members that have no field. What they hold is unknown, so people do not see it.
func (e *encoder) extra(m map[string]json.RawMessage, outer int) error {
	if len(m) == 0 {
		return nil
	}
	for _, k := range slices.Sorted(maps.Keys(m)) {
		e.path = append(e.path, fmt.Sprintf("Extra[%.64q]", k))
		if slices.Contains(e.names[outer:], k) && !e.mask {
			return errors.New("a field has that name")
		}
		e.comma('{')
		if err := e.std(k); err != nil {
			return err
		}
		e.buf.WriteByte(':')
		if err := e.value(reflect.ValueOf(m[k]), true); err != nil {
			return err
		}
		e.path = e.path[:len(e.path)-1]
	}
	return nil
}

// at writes the element that step leads to.
func (e *encoder) at(step string, v reflect.Value, secret bool) error {
	e.path = append(e.path, step)
	if err := e.value(v, secret); err != nil {
		return err
	}
	e.path = e.path[:len(e.path)-1]
	return nil
}

// comma separates from the element before, where there is one. No element ends with an opening bracket.
func (e *encoder) comma(open byte) {
	if b := e.buf.Bytes(); b[len(b)-1] != open {
		e.buf.WriteByte(',')
	}
}

// std writes v as package encoding/json does, but for HTML.
func (e *encoder) std(v any) error {
	enc := json.NewEncoder(&e.buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return err
	}
	e.buf.Truncate(e.buf.Len() - 1) // the newline
	return nil
}

// invalid returns an ErrInvalidConfig for a field of SessionConfig.
func invalid(field, format string, args ...any) error {
	return fmt.Errorf("%w: SessionConfig.%s: %w", ErrInvalidConfig, field, fmt.Errorf(format, args...))
}

// maskedJSON returns v without its secrets, as the MarshalJSON methods below need it.
func maskedJSON(v any) ([]byte, error) {
	e := encoder{mask: true}
	return e.encode(v)
}

// formatMasked prints v without its secrets, whatever the verb.
func formatMasked(f fmt.State, v any) {
	text, err := maskedJSON(v)
	if err != nil {
		text = []byte("{?}") // a value of the caller's that has no JSON; the error might quote it
	}
	fmt.Fprintf(f, "%T%s", v, text)
}

// secretsOf returns the secrets in v that are long enough to be hidden in texts without harm to these, longest first.
func secretsOf(v any) []string {
	e := encoder{mask: true}
	_, _ = e.encode(v) // what has no JSON is refused before it can be used
	return hidden(e.secrets)
}

// hidden returns which of the secrets that an encoder has met are to be hidden in texts.
func hidden(secrets []string) []string {
	var list []string
	for _, s := range secrets {
		list = append(list, s)
		if scheme, token, ok := strings.Cut(s, " "); ok && (strings.EqualFold(scheme, "bearer") || strings.EqualFold(scheme, "basic")) {
			list = append(list, token) // servers quote it without the scheme
		}
		if name, value, ok := strings.Cut(s, "="); ok && namesSecret(name) {
			list = append(list, value) // of Options.Env
		}
	}
	slices.SortFunc(list, func(a, b string) int { return cmp.Or(len(b)-len(a), strings.Compare(a, b)) })
	return slices.DeleteFunc(slices.Compact(list), func(s string) bool { return len(s) < minSecret })
}

// namesSecret reports whether an environment variable of that name is likely to hold a secret.
func namesSecret(name string) bool {
	name = strings.ToLower(name)
	return strings.Contains(name, "token") || strings.Contains(name, "key") || strings.Contains(name, "secret") || strings.Contains(name, "passw")
}

// minSecret is the length, in bytes, from which a secret is hidden in texts that come from elsewhere. Shorter ones ("1", "no")
// are parts of ordinary words.
const minSecret = 4

// Format prints c without its secrets, for every verb.
func (c SessionConfig) Format(f fmt.State, verb rune) { formatMasked(f, c) }

// MarshalJSON returns c without its secrets.
func (c SessionConfig) MarshalJSON() ([]byte, error) { return maskedJSON(c) }

// Format prints p without its secrets, for every verb.
func (p ProviderConfig) Format(f fmt.State, verb rune) { formatMasked(f, p) }

// MarshalJSON returns p without its secrets.
func (p ProviderConfig) MarshalJSON() ([]byte, error) { return maskedJSON(p) }

// Format prints p without its secrets, for every verb.
func (p NamedProviderConfig) Format(f fmt.State, verb rune) { formatMasked(f, p) }

// MarshalJSON returns p without its secrets.
func (p NamedProviderConfig) MarshalJSON() ([]byte, error) { return maskedJSON(p) }

// Format prints s without its secrets, for every verb.
func (s MCPServerConfig) Format(f fmt.State, verb rune) { formatMasked(f, s) }

// MarshalJSON returns s without its secrets.
func (s MCPServerConfig) MarshalJSON() ([]byte, error) { return maskedJSON(s) }

// Format prints a without its secrets, for every verb. Without it, package fmt would bypass the methods of MCPServers where a
// verb does not fit a pointer.
func (a CustomAgent) Format(f fmt.State, verb rune) { formatMasked(f, a) }

// MarshalJSON returns a without its secrets.
func (a CustomAgent) MarshalJSON() ([]byte, error) { return maskedJSON(a) }

// Format prints m without its secrets, for every verb.
func (m Message) Format(f fmt.State, verb rune) { formatMasked(f, m) }

// MarshalJSON returns m without its secrets.
func (m Message) MarshalJSON() ([]byte, error) { return maskedJSON(m) }

// Format prints o without its secrets, for every verb.
func (o Options) Format(f fmt.State, verb rune) { formatMasked(f, o) }

// MarshalJSON returns o without its secrets.
func (o Options) MarshalJSON() ([]byte, error) { return maskedJSON(o) }

// Format prints t without its secrets, for every verb.
func (t MCPAuthToken) Format(f fmt.State, verb rune) { formatMasked(f, t) }

// MarshalJSON returns t without its secrets.
func (t MCPAuthToken) MarshalJSON() ([]byte, error) { return maskedJSON(t) }
