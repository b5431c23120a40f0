package copilot

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

// A matrix is what a row of TestRealMatrix has: a client that all rows share, a model of its own, and the time that a slow machine needs.
type matrix struct {
	*testing.T
	ctx    context.Context
	client *Client
	model  *modelServer
}

func (m matrix) must(err error) {
	m.Helper()
	if err != nil {
		m.Fatal(err)
	}
}

func (m matrix) want(what string, got, want any) {
	m.Helper()
	if !reflect.DeepEqual(got, want) {
		m.Errorf("%s: got %v, want %v", what, got, want)
	}
}

func (m matrix) contains(what, text string, parts ...string) {
	m.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			m.Errorf("%s: no %q in %q", what, part, text)
		}
	}
}

// config completes a row's configuration.
func (m matrix) config(cfg SessionConfig) *SessionConfig {
	if cfg.WorkingDirectory == "" {
		cfg.WorkingDirectory = m.TempDir()
	}
	p := hostProvider(m.model)
	if cfg.Provider != nil {
		p.MaxPromptTokens = cfg.Provider.MaxPromptTokens
	}
	cfg.Model, cfg.Provider = "fake-model", p
	return &cfg
}

// create creates a session that is released at the row's end.
func (m matrix) create(c *Client, cfg SessionConfig) *Session {
	m.Helper()
	s, err := c.CreateSession(m.ctx, m.config(cfg))
	m.must(err)
	m.Cleanup(func() {
		if err := s.Disconnect(m.ctx); err != nil && c.Err() == nil {
			m.Errorf("disconnect: %v", err)
		}
	})
	return s
}

// matrixAwait is await with the row's patience.
func matrixAwait[T any](m matrix, what string, c <-chan T) (v T) {
	m.Helper()
	select {
	case v = <-c:
	case <-m.ctx.Done():
		m.Fatalf("%s: %v", what, m.ctx.Err())
	}
	return v
}

// until reads events up to the main agent's next one of a type.
func (m matrix) until(sub *Subscription[Event], typ EventType) (events []Event) {
	m.Helper()
	for {
		e, err := sub.Next(m.ctx)
		if err != nil {
			m.Fatalf("waiting for %s: %v", typ, err)
		}
		if events = append(events, e); e.Type == typ && e.AgentID == "" {
			return events
		}
	}
}

// A matrixTurn is what came of a message.
type matrixTurn struct {
	text     string // the main agent's last message
	err      error
	events   []Event
	requests []matrixRequest // what the model was asked
}

// try sends a message and waits for its end.
func (m matrix) try(s *Session, msg Message) (turn matrixTurn) {
	m.Helper()
	before := len(m.model.Requests())
	for e, err := range s.Ask(m.ctx, msg) {
		if turn.err = err; err != nil {
			break
		}
		turn.events = append(turn.events, e)
		if a, ok := e.Payload().(*AssistantMessage); ok && e.AgentID == "" {
			turn.text = a.Content
		}
	}
	turn.requests = m.requests()[before:]
	return turn
}

// turn is try where nothing may go wrong and the answer is known.
func (m matrix) turn(s *Session, prompt, answer string) matrixTurn {
	m.Helper()
	turn := m.try(s, Message{Prompt: prompt})
	m.must(turn.err)
	if turn.text != answer {
		m.Errorf("the answer to %.80q is %.200q, want %.200q", prompt, turn.text, answer)
	}
	return turn
}

// A matrixRequest is a question to the model as the model sees it.
type matrixRequest struct {
	Model           string
	Stream          bool
	ReasoningEffort string `json:"reasoning_effort"`
	Messages        []modelMessage
	Tools           []struct {
		Function struct{ Name, Description string }
	}
	body string
}

func (m matrix) requests() (all []matrixRequest) {
	m.Helper()
	for _, r := range m.model.Requests() {
		q := matrixRequest{body: string(r.Body)}
		m.must(json.Unmarshal(r.Body, &q))
		all = append(all, q)
	}
	return all
}

func (r matrixRequest) tools() (names []string) {
	for _, t := range r.Tools {
		names = append(names, t.Function.Name)
	}
	return names
}

// text returns all that one role says in the request.
func (r matrixRequest) text(role string) string {
	var parts []string
	for _, m := range r.Messages {
		if m.Role == role {
			parts = append(parts, m.Text)
		}
	}
	return strings.Join(parts, "\n")
}

// matrixPayloads are the payloads of one type, those of one kind of agent: the main one or the others.
func matrixPayloads[P Payload](events []Event, main bool) (found []P) {
	for _, e := range events {
		if p, ok := e.Payload().(P); ok && (e.AgentID == "") == main {
			found = append(found, p)
		}
	}
	return found
}

// matrixOne is matrixPayloads of the main agent where there must be exactly one.
func matrixOne[P Payload](m matrix, events []Event) (one P) {
	m.Helper()
	found := matrixPayloads[P](events, true)
	if len(found) != 1 {
		m.Fatalf("%d payloads of type %T", len(found), one)
	}
	return found[0]
}

// fails has the model fail until the CLI gives up, and after that answer again.
func (m matrix) fails(script string, tries int, retry string, want AgentError) {
	s := m.create(m.client, SessionConfig{Streaming: true})
	turn := m.try(s, Message{Prompt: script})
	var failed *AgentError
	if !errors.As(turn.err, &failed) {
		m.Fatalf("got %v, want an AgentError", turn.err)
	}
	m.want("the error", AgentError{Type: failed.Type, StatusCode: failed.StatusCode}, want)
	m.want("is one of authentication", errors.Is(turn.err, ErrAuthentication), want.StatusCode == 401)
	m.want("requests", len(turn.requests), tries)
	reported := matrixOne[*SessionErrorEvent](m, turn.events)
	m.want("the event's words and code", AgentError{Message: reported.Message, StatusCode: reported.StatusCode}, AgentError{Message: failed.Message, StatusCode: failed.StatusCode})
	retries, partial := 0, make(map[string]string)
	for _, e := range turn.events {
		if e.Type == EventAssistantTurnRetry {
			m.want("the reason for a retry", unquote(member(e.Data, "reason")), retry)
			retries++
		}
	}
	for _, d := range matrixPayloads[*AssistantMessageDelta](turn.events, true) {
		partial[d.MessageID] += d.DeltaContent
	}
	m.want("retries", retries, tries-1)
	// Each try streams anew, as a message of its own; none becomes a whole message.
	if strings.HasPrefix(script, "cut") {
		m.want("messages begun", len(partial), tries)
		for _, text := range partial {
			m.want("a message begun", text, "one ")
		}
	}
	m.want("whole messages", len(matrixPayloads[*AssistantMessage](turn.events, true)), 0)
	m.turn(s, "say: recovered", "recovered")
}

// converse takes a session through its life. Nothing of what the server stores was missing from the events, nor out of order.
func (m matrix) converse(c *Client) {
	p, err := c.PrepareSession(m.config(SessionConfig{Streaming: true, OnPermission: ApproveAll}))
	m.must(err)
	sub := p.Subscribe()
	s, err := p.Start(m.ctx)
	m.must(err)
	m.turn(s, "say: hello", "hello")
	turn := m.turn(s, `call: glob {"pattern":"*"}`, "tool said: No files matched the pattern.")
	m.want("the tool succeeded", matrixOne[*ToolExecutionComplete](m, turn.events).Success, true)
	history, err := s.History(m.ctx)
	m.must(err)
	info, err := c.SessionInfo(m.ctx, s.ID())
	m.must(err)
	m.want("the session is known", info != nil, true)
	m.must(s.Disconnect(m.ctx))
	names := func(events []Event) (names []string) {
		for _, e := range events {
			if !e.Ephemeral {
				names = append(names, string(e.Type)+" "+e.ID)
			}
		}
		return names
	}
	var events []Event
	for e, err := range sub.All(m.ctx) {
		m.must(err)
		events = append(events, e)
	}
	all, stored := names(events), names(history)
	m.want("history and events", stored, all[:min(len(stored), len(all))])
	m.want("events of the release", len(matrixPayloads[*SessionShutdown](events, true)), 1)
}

// resume resumes a session that had these prompts, and returns what the resume event says.
func (m matrix) resume(c *Client, id, prompts string) *SessionResume {
	m.Helper()
	p, err := c.PrepareResumeSession(id, m.config(SessionConfig{}))
	m.must(err)
	sub := p.Subscribe()
	s, err := p.Start(m.ctx)
	m.must(err)
	m.turn(s, "history", prompts)
	m.must(s.Disconnect(m.ctx))
	return matrixOne[*SessionResume](m, m.until(sub, EventSessionResume))
}

// TestRealMatrix takes the real CLI through what a session can be and meet, a row a scenario. Tests of their own have: tools and the
// ways in which they fail, permissions, questions, single hooks, transforms, commands, abort (TestRealHandlers), forms of the host
// (TestRealElicitation), a call that is pending at a kill (TestRealPendingTool), single requests (TestRealHelpers).
func TestRealMatrix(t *testing.T) {
	mark := fmt.Sprintf("matrix.%d.%d", os.Getpid(), time.Now().UnixNano())
	if runtime.GOOS == "linux" {
		procLeakCheck(t, "PROC_MARK="+mark)
	} else {
		leakCheck(t)
	}
	t.Setenv("PROC_MARK", mark)
	client := startReal(t, Options{})
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	helper := CustomAgent{Name: "helper", DisplayName: "Helper", Description: "helps", Prompt: "You are the helper.", Tools: []string{"view"}} // may only look
	rows := []struct {
		name string
		run  func(m matrix)
	}{
		// The CLI waits between its tries: first, so that the others run beside them.
		{"model answers 500", func(m matrix) { m.fails("status: 500", 6, "api_error", AgentError{Type: "query", StatusCode: 500}) }},
		{"model cuts its stream", func(m matrix) { m.fails("cut: one two", 6, "streaming_error", AgentError{Type: "query"}) }},
		{"model answers 401", func(m matrix) {
			m.fails("status: 401", 3, "transient_auth_error", AgentError{Type: "authentication", StatusCode: 401})
		}},
		{"no login", func(m matrix) { // a session is accepted; its first turn reports
			s, err := m.client.CreateSession(m.ctx, &SessionConfig{WorkingDirectory: m.TempDir()})
			m.must(err)
			turn := m.try(s, Message{Prompt: "hello"})
			m.want("ErrAuthentication", errors.Is(turn.err, ErrAuthentication), true)
			m.must(s.Disconnect(m.ctx))
		}},

		{"stdio", func(m matrix) { m.converse(m.client) }},
		{"TCP and Dial", func(m matrix) {
			const token = "a token of ours"
			server := startReal(m.T, Options{Transport: TCP, ConnectionToken: token})
			m.converse(server)
			addr := server.conn.rwc.(net.Conn).RemoteAddr().String()
			var refused *RPCError
			if _, err := Dial(m.ctx, addr, &Options{ConnectionToken: "another"}); !errors.As(err, &refused) || refused.Method != "connect" {
				m.Errorf("a wrong token: %v", err)
			}
			guest, err := Dial(m.ctx, addr, &Options{ConnectionToken: token})
			m.must(err)
			m.want("the guest's process", guest.PID(), 0)
			m.want("the guest's server", guest.Server(), server.Server())
			m.converse(guest)
			m.must(guest.Stop(m.ctx))
			_, err = server.Ping(m.ctx, "")
			m.want("the server after its guest has left", err, nil)
		}},

		{"no tools", func(m matrix) {
			s := m.create(m.client, SessionConfig{AvailableTools: []string{}})
			turn := m.turn(s, `call: view {"path":"/"}`, "tool said: Tool 'view' does not exist. Available tools that can be called are .")
			m.want("tools", turn.requests[0].tools(), []string(nil))
			m.want("a call", matrixOne[*ToolExecutionComplete](m, turn.events).Success, false)
		}},
		{"available tools", func(m matrix) {
			s := m.create(m.client, SessionConfig{
				AvailableTools: []string{"builtin:view", "grep", "custom:*"},
				ExcludedTools:  []string{"other"}, // wins
				Tools:          []Tool{{Name: "mine"}, {Name: "other"}},
			})
			m.want("for the model", m.turn(s, "say: hi", "hi").requests[0].tools(), []string{"view", "grep", "mine"})
			infos, err := s.Tools(m.ctx)
			m.must(err)
			var names []string
			for _, info := range infos {
				names = append(names, info.Name)
			}
			m.want("listed", names, []string{"view", "grep", "mine"})
		}},
		{"excluded tools", func(m matrix) {
			all := m.turn(m.create(m.client, SessionConfig{}), "say: hi", "hi").requests[0].tools()
			some := m.turn(m.create(m.client, SessionConfig{ExcludedTools: []string{"view", "builtin:grep"}}), "say: hi", "hi").requests[0].tools()
			rest := slices.DeleteFunc(slices.Clone(all), func(name string) bool { return name == "view" || name == "grep" })
			m.want("excluded", len(all)-len(rest), 2)
			m.want("tools", some, rest)
		}},
		{"tool in place of a built-in", func(m matrix) {
			mine := NewTool("view", "my own view", func(_ context.Context, in struct{ Path string }) (string, error) { return "seen " + in.Path, nil })
			mine.SkipPermission = true
			// Without a word of it, no turn begins.
			turn := m.try(m.create(m.client, SessionConfig{Tools: []Tool{mine}}), Message{Prompt: "say: hi"})
			var failed *AgentError
			m.want("is an AgentError", errors.As(turn.err, &failed), true)
			m.want("requests", len(turn.requests), 0)
			mine.OverridesBuiltIn = true
			turn = m.turn(m.create(m.client, SessionConfig{Tools: []Tool{mine}}), `call: view {"Path":"/x"}`, "tool said: seen /x")
			var described []string
			for _, tool := range turn.requests[0].Tools {
				if tool.Function.Name == "view" {
					described = append(described, tool.Function.Description)
				}
			}
			m.want("view", described, []string{"my own view"})
		}},
		{"MCP server over stdio", func(m matrix) {
			asked, forms := make(chan PermissionRequest, 3), make(chan ElicitationRequest, 1)
			s := m.create(m.client, SessionConfig{
				MCPServers: map[string]MCPServerConfig{
					"none": {Command: self + "-none"},
					"tiny": {Command: self, Env: map[string]string{"COPILOT_TEST_CHILD": "mcp", "GORACE": "atexit_sleep_ms=0", "TINY": "a value", "PROC_MARK": mark}, Tools: []string{"echo", "fail", "ask"}},
				},
				OnPermission: func(_ context.Context, r PermissionRequest) (PermissionDecision, error) {
					asked <- r
					return ApproveOnce(), nil
				},
				OnElicitation: func(_ context.Context, r ElicitationRequest) (ElicitationResult, error) {
					forms <- r
					return ElicitationResult{ElicitationAccept, map[string]any{"colour": "green"}}, nil
				},
			})
			servers, err := s.MCPServers(m.ctx) // answered when all have started
			m.must(err)
			status := make(map[string]MCPServerStatus)
			for _, server := range servers {
				status[server.Name] = server.Status
			}
			m.want("servers", status, map[string]MCPServerStatus{"none": MCPFailed, "tiny": MCPConnected})

			turn := m.turn(s, `call: tiny-echo {"text":"hi"}`, "tool said: hi, a value")
			tools := turn.requests[0].tools()
			m.want("the server's tools", tools[len(tools)-3:], []string{"tiny-ask", "tiny-echo", "tiny-fail"})
			for _, e := range turn.events {
				if start, ok := e.Payload().(*ToolExecutionStart); ok {
					m.want("server and tool", []string{start.MCPServerName, start.MCPToolName, start.MCPTransport}, []string{"tiny", "echo", "stdio"})
				}
			}
			r := matrixAwait(m, "permission", asked)
			m.want("permission", []any{r.Kind, r.ServerName, r.ToolName, string(r.Args)}, []any{PermissionMCP, "tiny", "tiny-echo", `{"text":"hi"}`})

			turn = m.turn(s, `call: tiny-fail {}`, "tool said: MCP server 'tiny': no luck")
			m.want("failure", *matrixOne[*ToolExecutionComplete](m, turn.events).Error, ToolError{Message: "MCP server 'tiny': no luck", Code: "failure"})

			m.turn(s, `call: tiny-ask {}`, "tool said: accept green")
			form := matrixAwait(m, "form", forms)
			m.want("form", []string{form.Source, form.Message}, []string{"tiny", "Which colour?"})
		}},
		{"skills directory", func(m matrix) {
			dir := m.TempDir()
			m.must(os.Mkdir(filepath.Join(dir, "greet"), 0o777))
			m.must(os.WriteFile(filepath.Join(dir, "greet", "SKILL.md"), []byte("---\nname: greet\ndescription: How to greet.\n---\nSay good day.\n"), 0o666))
			for _, disabled := range [][]string{nil, {"greet"}} {
				s := m.create(m.client, SessionConfig{SkillDirectories: []string{dir}, DisabledSkills: disabled, OnPermission: ApproveAll})
				skills, err := s.Skills(m.ctx)
				m.must(err)
				i := slices.IndexFunc(skills, func(k LoadedSkill) bool { return k.Name == "greet" })
				if i < 0 {
					m.Fatalf("skills are %+v", skills)
				}
				m.want("skill", []any{skills[i].Description, skills[i].Source, skills[i].Enabled}, []any{"How to greet.", "custom", disabled == nil})
				turn := m.try(s, Message{Prompt: `call: skill {"skill":"greet"}`})
				m.must(turn.err)
				m.want("the model is told of it", strings.Contains(turn.requests[0].body, "How to greet."), disabled == nil)
				m.want("the model is given it", strings.Contains(turn.requests[len(turn.requests)-1].text("user"), "Say good day."), disabled == nil)
				if disabled == nil {
					k := matrixOne[*SkillInvoked](m, turn.events)
					m.want("invoked", []string{k.Name, k.Trigger, strings.TrimSpace(k.Content)}, []string{"greet", "agent-invoked", "Say good day."})
				}
			}
		}},
		{"custom agent", func(m matrix) {
			s := m.create(m.client, SessionConfig{CustomAgents: []CustomAgent{helper}, Agent: "helper"})
			for _, name := range []string{"helper", ""} {
				m.must(s.SelectAgent(m.ctx, name))
				agent, err := s.Agent(m.ctx)
				m.must(err)
				m.want("active", agent != nil && agent.DisplayName == "Helper", name != "")
				r := m.turn(s, "say: hi", "hi").requests[0]
				m.want("may look", slices.Contains(r.tools(), "view"), true)
				m.want("may edit", slices.Contains(r.tools(), "edit"), name == "")
				m.want("speaks as the helper", strings.Contains(r.text("system"), helper.Prompt), name != "")
			}
		}},
		{"sub-agent", func(m matrix) {
			hooks := make(chan string, 8)
			s := m.create(m.client, SessionConfig{
				Streaming: true, CustomAgents: []CustomAgent{helper}, OnPermission: ApproveAll,
				Hooks: &Hooks{
					SubagentStart: func(_ context.Context, in SubagentStartInput) error { hooks <- "start " + in.AgentName; return nil },
					SubagentStop:  func(_ context.Context, in SubagentStopInput) error { hooks <- "stop " + in.AgentName; return nil },
				},
			})
			turn := m.turn(s, `call: task {"agent_type":"helper","name":"looker","description":"look","prompt":"say: a look","mode":"sync"}`, "tool said: a look")
			var ids []string
			for _, e := range turn.events {
				if e.AgentID != "" && !slices.Contains(ids, e.AgentID) {
					ids = append(ids, e.AgentID)
				}
			}
			m.want("other agents", len(ids), 1)
			started, completed := matrixPayloads[*SubagentStarted](turn.events, false), matrixPayloads[*SubagentCompleted](turn.events, false)
			if len(started) != 1 || len(completed) != 1 {
				m.Fatalf("started %v, completed %v", started, completed)
			}
			call := matrixPayloads[*AssistantMessage](turn.events, true)[0].ToolRequests[0].ToolCallID
			m.want("who began and ended", []string{started[0].AgentName, started[0].ToolCallID, completed[0].ToolCallID}, []string{"helper", call, call})
			for agent, want := range map[bool]string{true: "tool said: a look", false: "a look"} {
				text := ""
				for _, d := range matrixPayloads[*AssistantMessageDelta](turn.events, agent) {
					text += d.DeltaContent
				}
				m.want("deltas", text, want)
			}
			m.want("the helper's request", turn.requests[1].tools(), []string{"view"})
			m.contains("the helper's prompt", turn.requests[1].text("system"), helper.Prompt)
			m.want("hooks", []string{matrixAwait(m, "hook", hooks), matrixAwait(m, "hook", hooks)}, []string{"start helper", "stop helper"})
		}},
		{"sub-agent in the background", func(m matrix) { // holds back the idle, and wakes the main agent at its end
			s := m.create(m.client, SessionConfig{CustomAgents: []CustomAgent{helper}, OnPermission: ApproveAll})
			sub := s.Subscribe()
			answer := make(chan string, 1)
			turn := async(func() error {
				a, err := s.SendAndWait(m.ctx, Message{Prompt: `call: task {"agent_type":"helper","name":"looker","description":"look","prompt":"hold: a look","mode":"background"}`})
				if err == nil {
					answer <- a.Content
				}
				return err
			})
			matrixAwait(m, "the helper's first word", m.model.Held)
			events := m.until(sub, EventAssistantIdle)
			tasks, err := s.Tasks(m.ctx)
			m.must(err)
			if len(tasks) != 1 {
				m.Fatalf("tasks are %+v", tasks)
			}
			m.want("task", []string{tasks[0].DisplayName, tasks[0].Status}, []string{"looker", "running"})
			m.model.Release()
			events = append(events, m.until(sub, EventSessionIdle)...)
			m.must(matrixAwait(m, "turn", turn))
			m.want("the answer, when it was woken", matrixAwait(m, "answer", answer), "no script")
			requests := m.requests()
			m.contains("what it was woken with", requests[len(requests)-1].text("tool"), "a look")
			m.want("ended", len(matrixPayloads[*SubagentCompleted](events, false)), 1)
		}},

		{"system message appended", func(m matrix) {
			plain := m.turn(m.create(m.client, SessionConfig{}), "say: hi", "hi").requests[0].text("system")
			longer := m.turn(m.create(m.client, SessionConfig{SystemMessage: &SystemMessage{Content: "MORE"}}), "say: hi", "hi").requests[0].text("system")
			m.contains("the plain one", plain, "You are ")
			m.contains("the longer one", longer, plain[:100], "MORE")
		}},
		{"system message replaced", func(m matrix) {
			s := m.create(m.client, SessionConfig{SystemMessage: &SystemMessage{Mode: "replace", Content: "Only this."}})
			m.want("system prompt", m.turn(s, "say: hi", "hi").requests[0].text("system"), "Only this.")
		}},
		{"system message customized", func(m matrix) {
			// What the sections are, as far as it is in a line.
			type section struct{ name, line string }
			sections := make(chan section, 2)
			cfg := SessionConfig{Transforms: make(map[string]func(context.Context, string) (string, error))}
			for _, name := range []string{"tone", "safety"} {
				cfg.Transforms[name] = func(_ context.Context, content string) (string, error) {
					longest := func(a, b string) int { return len(a) - len(b) }
					sections <- section{name, slices.MaxFunc(strings.Split(content, "\n"), longest)}
					return content, nil
				}
			}
			plain := m.turn(m.create(m.client, cfg), "say: hi", "hi").requests[0].text("system")
			s := m.create(m.client, SessionConfig{SystemMessage: &SystemMessage{Content: "MORE", Sections: map[string]SystemSection{
				"identity": {Action: "prepend", Content: "BEFORE"},
				"tone":     {Action: "replace", Content: "INSTEAD"},
				"safety":   {Action: "remove"},
			}}})
			got := m.turn(s, "say: hi", "hi").requests[0].text("system")
			m.contains("system prompt", got, "BEFORE", "INSTEAD", "MORE")
			for range cfg.Transforms {
				section := matrixAwait(m, "section", sections)
				m.contains("system prompt before", plain, section.line)
				m.want("system prompt still has "+section.name, strings.Contains(got, section.line), false)
			}
		}},
		{"reasoning effort and model switch", func(m matrix) {
			s := m.create(m.client, SessionConfig{ReasoningEffort: "high"})
			r := m.turn(s, "say: hi", "hi").requests[0]
			m.want("asked", []string{r.Model, r.ReasoningEffort}, []string{"fake-model", "high"})
			sub := s.Subscribe()
			defer sub.Close()
			m.must(s.SetModel(m.ctx, "other-model", &ModelOptions{ReasoningEffort: "low"}))
			change := matrixOne[*SessionModelChange](m, m.until(sub, EventSessionModelChange))
			m.want("change", []string{change.PreviousModel, change.NewModel, change.PreviousReasoningEffort, change.ReasoningEffort}, []string{"fake-model", "other-model", "high", "low"})
			current, err := s.Model(m.ctx)
			m.must(err)
			m.want("current", []string{current.ModelID, current.ReasoningEffort}, []string{"other-model", "low"})
			r = m.turn(s, "say: hi", "hi").requests[0]
			m.want("asked", []string{r.Model, r.ReasoningEffort}, []string{"other-model", "low"})
		}},
		{"streaming on and off", func(m matrix) {
			for streaming, want := range map[bool][]string{true: {"a ", "b ", "c"}, false: nil} {
				turn := m.turn(m.create(m.client, SessionConfig{Streaming: streaming}), "say: a b c", "a b c")
				m.want("asked to stream", turn.requests[0].Stream, streaming)
				var deltas []string
				for _, d := range matrixPayloads[*AssistantMessageDelta](turn.events, true) {
					deltas = append(deltas, d.DeltaContent)
				}
				m.want("deltas", deltas, want)
			}
		}},

		{"plan mode", func(m matrix) {
			asked := make(chan ExitPlanModeRequest, 2)
			s := m.create(m.client, SessionConfig{OnExitPlanMode: func(_ context.Context, r ExitPlanModeRequest) (ExitPlanModeResult, error) {
				asked <- r
				if r.Summary == "too early" {
					return ExitPlanModeResult{Feedback: "think again"}, nil
				}
				return ExitPlanModeResult{Approved: true, SelectedAction: "interactive"}, nil
			}})
			m.must(s.SetMode(m.ctx, AgentModePlan))
			m.must(s.UpdatePlan(m.ctx, "# Plan"))
			for _, round := range []struct {
				summary, told string
				mode          AgentMode
			}{{"too early", "think again", AgentModePlan}, {"do it", "Plan approved", AgentModeInteractive}} {
				// The CLI puts a word of its own before the prompt's first line.
				turn := m.try(s, Message{Prompt: "go\n" + `call: exit_plan_mode {"summary":"` + round.summary + `"}`})
				m.must(turn.err)
				r := matrixAwait(m, "plan", asked)
				m.want("asked", []string{r.Summary, r.PlanContent}, []string{round.summary, "# Plan"})
				m.contains("the tool's result", matrixOne[*ToolExecutionComplete](m, turn.events).Result.Content, round.told)
				m.want("the message's mode", matrixOne[*UserMessage](m, turn.events).AgentMode, AgentModePlan)
				mode, err := s.Mode(m.ctx)
				m.must(err)
				m.want("mode", mode, round.mode)
				m.want("idle", matrixOne[*SessionIdle](m, turn.events).Mode, round.mode)
			}
		}},
		{"autopilot mode", func(m matrix) {
			s := m.create(m.client, SessionConfig{OnPermission: ApproveAll})
			m.must(s.SetMode(m.ctx, AgentModeAutopilot))
			stopped := func(turn matrixTurn) string {
				m.must(turn.err)
				last := len(turn.events) - 1
				m.want("the last event", *turn.events[last].Payload().(*SessionIdle), SessionIdle{Mode: AgentModeAutopilot})
				for _, e := range turn.events {
					if e.Type == EventSessionAutopilotStopped {
						return unquote(member(e.Data, "reason"))
					}
				}
				return ""
			}
			turn := m.try(s, Message{Prompt: `call: task_complete {"summary":"all done"}`})
			m.want("stopped since", stopped(turn), "task_complete")
			m.want("task", matrixOne[*SessionTaskComplete](m, turn.events).Summary, "all done")
			// Who does not say that the task is done is told to go on, some times. That is one turn.
			turn = m.try(s, Message{Prompt: "say: not yet"})
			m.want("stopped since", stopped(turn), "cap_reached")
			told := matrixPayloads[*UserMessage](turn.events, true)[1:]
			for _, u := range told {
				m.want("the CLI's words", u.IsAutopilotContinuation, true)
			}
			m.want("continued", len(told) > 0, true)
			m.want("requests", len(turn.requests), 1+len(told))
		}},
		{"infinite session", func(m matrix) {
			half := 0.5
			s := m.create(m.client, SessionConfig{
				Provider: &ProviderConfig{MaxPromptTokens: 8000}, AvailableTools: []string{}, SystemMessage: &SystemMessage{Mode: "replace", Content: "Be brief."},
				InfiniteSessions: &InfiniteSessions{BackgroundCompactionThreshold: &half},
			})
			sub := s.Subscribe()
			long := strings.Repeat("word ", 4500) + "end"
			m.turn(s, "say: "+long, long)
			m.turn(s, "say: more", "more")
			events := m.until(sub, EventSessionCompactionComplete)
			m.want("begun since", matrixOne[*SessionCompactionStart](m, events).Trigger, "threshold")
			done := matrixOne[*SessionCompactionComplete](m, events)
			m.want("compaction", []any{done.Success, done.Outcome, done.SummaryContent}, []any{true, "applied", "no script"})
			m.want("requests", len(m.requests()), 3) // the turns and the summary, which is the model's own
			for _, r := range m.turn(s, "say: after", "after").requests {
				if last := r.Messages[len(r.Messages)-1].Text; !strings.Contains(last, "say: after") {
					continue // the next compaction, which runs beside the turn
				}
				m.contains("what the model is told", r.text("user"), "no script")
				m.want("what it has said, as far as it is told", r.text("assistant"), "more")
			}
		}},
		{"attachments", func(m matrix) {
			dir := m.TempDir()
			file, other := filepath.Join(dir, "a.txt"), filepath.Join(dir, "b.txt")
			m.must(os.WriteFile(file, []byte("alpha\nbeta\n"), 0o666))
			m.must(os.WriteFile(other, []byte("gamma\nthe words selected\n"), 0o666))
			vision := true
			s := m.create(m.client, SessionConfig{WorkingDirectory: dir, ModelCapabilities: &ModelCapabilities{Supports: &ModelSupports{Vision: &vision}}})
			const image = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
			turn := m.try(s, Message{Prompt: "say: got it", Attachments: []Attachment{
				{Type: AttachmentFile, Path: file},
				{Type: AttachmentDirectory, Path: dir},
				{Type: AttachmentSelection, FilePath: other, Text: "words", Selection: &Selection{Start: Position{1, 4}, End: Position{1, 9}}},
				{Type: AttachmentBlob, Data: image, MIMEType: "image/png"},
			}})
			m.must(turn.err)
			var types []AttachmentType
			for _, a := range matrixOne[*UserMessage](m, turn.events).Attachments {
				types = append(types, a.Type)
			}
			m.want("echoed", types, []AttachmentType{AttachmentFile, AttachmentDirectory, AttachmentSelection, AttachmentBlob})
			m.contains("the model's request", turn.requests[0].text("user"), "* "+file+" (3 lines)", "* "+dir+" (2 items)", "File: b.txt (line 2)\n```\nwords\n```")
			m.contains("the model's request", turn.requests[0].body, `"data:image/png;base64,`+image+`"`)
			// What is stored of them can be read again.
			m.must(s.Disconnect(m.ctx))
			m.resume(m.client, s.ID(), "say: got it")
		}},

		{"resume", func(m matrix) {
			s := m.create(m.client, SessionConfig{})
			m.turn(s, "say: one", "one")
			m.must(s.Disconnect(m.ctx))
			resumed := m.resume(m.client, s.ID(), "say: one")
			m.want("was active", resumed.SessionWasActive, false)
			m.want("model", resumed.SelectedModel, "fake-model")
			_, err := m.client.ResumeSession(m.ctx, "never-created", m.config(SessionConfig{}))
			m.want("ErrSessionNotFound", errors.Is(err, ErrSessionNotFound), true)
		}},
		{"resume after a kill", func(m matrix) {
			home := m.TempDir()
			c := startReal(m.T, Options{BaseDir: home})
			s := m.create(c, SessionConfig{Streaming: true})
			m.turn(s, "say: one", "one")
			turn := async(func() error { _, err := s.SendAndWait(m.ctx, Message{Prompt: "hold: two three"}); return err })
			matrixAwait(m, "the model's first word", m.model.Held)
			m.stored(home, s.ID(), "hold: two three")
			kill(m, c.PID())
			matrixAwait(m, "the client's end", c.Done())
			for what, err := range map[string]error{"turn": matrixAwait(m, "the turn", turn), "client": c.Err(), "session": context.Cause(s.Context())} {
				var exit *ExitError
				m.want("an ExitError ends the "+what, errors.As(err, &exit), true)
			}
			m.resume(startReal(m.T, Options{BaseDir: home}), s.ID(), "say: one | hold: two three")
		}},
		{"two sessions at once", func(m matrix) {
			slow, quick := m.create(m.client, SessionConfig{Streaming: true}), m.create(m.client, SessionConfig{})
			turn := async(func() error { _, err := slow.SendAndWait(m.ctx, Message{Prompt: "hold: one two"}); return err })
			matrixAwait(m, "the model's first word", m.model.Held)
			m.turn(quick, "say: quick", "quick")
			m.turn(quick, "history", "say: quick")
			select {
			case err := <-turn:
				m.Errorf("the other turn has ended: %v", err)
			default:
			}
			m.model.Release()
			m.must(matrixAwait(m, "the slow turn", turn))
			m.turn(slow, "history", "hold: one two")
		}},
		{"20 sessions at once", func(m matrix) {
			ended := make([]<-chan error, 20)
			for i := range ended {
				ended[i] = async(func() error {
					s, err := m.client.CreateSession(m.ctx, m.config(SessionConfig{Streaming: true}))
					if err != nil {
						return err
					}
					want, text, whole := fmt.Sprintf("session %d of 20", i), "", ""
					for e, err := range s.Ask(m.ctx, Message{Prompt: "hold: " + want}) {
						if err != nil {
							return err
						}
						switch p := e.Payload().(type) {
						case *AssistantMessageDelta:
							text += p.DeltaContent
						case *AssistantMessage:
							whole += p.Content
						}
					}
					if text != want || whole != want {
						return fmt.Errorf("got %q and %q, want %q", text, whole, want)
					}
					return s.Disconnect(m.ctx)
				})
			}
			for range ended {
				matrixAwait(m, "an answer that is held", m.model.Held) // all run before the first may end
			}
			for range ended {
				m.model.Release()
			}
			for _, ended := range ended {
				m.must(matrixAwait(m, "turn", ended))
			}
		}},

		{"queued messages", func(m matrix) {
			s := m.create(m.client, SessionConfig{})
			sub := s.Subscribe()
			send := func(msg Message) string {
				id, err := s.Send(m.ctx, msg)
				m.must(err)
				return id
			}
			answer := make(chan string, 1)
			turn := async(func() error {
				a, err := s.SendAndWait(m.ctx, Message{Prompt: "hold: one two"})
				if err == nil {
					answer <- a.Content
				}
				return err
			})
			matrixAwait(m, "the model's first word", m.model.Held)
			b, c := send(Message{Prompt: "say: b"}), send(Message{Prompt: "say: c"})
			a := send(Message{Prompt: "say: a", Prepend: true})
			queue, err := s.Queue(m.ctx)
			m.must(err)
			var queued []string
			for _, item := range queue.Items {
				queued = append(queued, item.MessageID)
			}
			m.want("queue", queued, []string{a, b, c})
			m.model.Release()
			events := m.until(sub, EventSessionIdle) // the only one
			var order, texts []string
			for _, u := range matrixPayloads[*UserMessage](events, true)[1:] {
				m.want("delivery", u.Delivery, "queued")
				order = append(order, u.MessageID)
			}
			for _, a := range matrixPayloads[*AssistantMessage](events, true) {
				texts = append(texts, a.Content)
			}
			m.want("order", order, []string{a, b, c})
			m.want("answers", texts, []string{"one two", "a", "b", "c"})
			m.must(matrixAwait(m, "the first turn", turn))
			m.want("the first one's answer", matrixAwait(m, "answer", answer), "one two")
		}},
		{"steering message", func(m matrix) {
			begun, goOn := make(chan struct{}), make(chan struct{})
			s := m.create(m.client, SessionConfig{Tools: []Tool{{Name: "slow", SkipPermission: true, Handler: func(ctx context.Context, _ ToolCall) (ToolResult, error) {
				close(begun)
				select {
				case <-goOn:
				case <-ctx.Done():
				}
				return ToolResult{Text: "done"}, nil
			}}}})

			sub := s.Subscribe()
			_, err := s.Send(m.ctx, Message{Prompt: "call: slow {}"})
			m.must(err)
			matrixAwait(m, "the tool", begun)
			id, err := s.Send(m.ctx, Message{Prompt: "say: steered", Mode: Immediate})
			m.must(err)
			queue, err := s.Queue(m.ctx)
			m.must(err)
			m.want("queue", []int{len(queue.Items), len(queue.SteeringMessages)}, []int{0, 1})
			close(goOn)
			events := m.until(sub, EventSessionIdle)
			said := matrixPayloads[*UserMessage](events, true)
			m.want("the second message", []string{said[1].MessageID, said[1].Delivery, said[1].InteractionID}, []string{id, "steering", said[0].InteractionID})
			answers := matrixPayloads[*AssistantMessage](events, true)
			m.want("the answer", answers[len(answers)-1].Content, "steered")
			last := m.requests()[1]
			m.want("the model has the result too", strings.TrimSpace(last.text("tool")), "done")
		}},
		{"hooks in order", func(m matrix) {
			hooks := make(chan HookCall, 32)
			s := m.create(m.client, SessionConfig{
				OnPermission: ApproveAll,
				Tools:        []Tool{{Name: "broken", SkipPermission: true, Handler: func(context.Context, ToolCall) (ToolResult, error) { return ToolResult{}, errors.New("broken") }}},
				OnHook:       func(_ context.Context, h HookCall) (any, error) { hooks <- h; return nil, nil },
			})
			m.turn(s, `call: glob {"pattern":"*"}`, "tool said: No files matched the pattern.")
			m.turn(s, `call: broken {}`, "tool said: broken")
			m.want("refused", m.try(s, Message{Prompt: "status: 400"}).err != nil, true)
			m.must(s.Disconnect(m.ctx))
			var order []string
			for range len(hooks) {
				h := <-hooks
				m.want("session", h.SessionID, s.ID())
				if h.Type != "sessionStart" { // no other waits for it
					order = append(order, h.Type)
				}
			}
			m.want("hooks", order, []string{
				"userPromptSubmitted", "userPromptTransformed", "preToolUse", "postToolUse", "agentStop",
				"userPromptSubmitted", "userPromptTransformed", "preToolUse", "postToolUseFailure", "agentStop",
				"userPromptSubmitted", "userPromptTransformed", "errorOccurred",
				"sessionEnd",
			})
		}},
	}
	// The rows run beside each other; when this Run returns, they have ended.
	t.Run("rows", func(t *testing.T) {
		for _, row := range rows {
			t.Run(row.name, func(t *testing.T) {
				t.Parallel()
				row.run(matrix{t, hdlContext(t), client, newModelServer(t)})
			})
		}
	})
}

// TestAnswersOfOthers has messages of others beside the one that is waited for.
func TestAnswersOfOthers(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	for _, tt := range []struct {
		name   string
		events [][3]string // "user", id, delivery or "assistant", text, whose message it answers; m is the one that is waited for
		want   string
	}{
		{"queued behind", [][3]string{{"user", "m", "idle"}, {"assistant", "mine", "m"}, {"user", "b", "queued"}, {"assistant", "", ""}, {"assistant", "not mine", "b"}}, "mine"},
		{"two queued behind", [][3]string{{"user", "m", "idle"}, {"assistant", "mine", "m"}, {"user", "b", "queued"}, {"assistant", "not mine", "b"}, {"user", "c", "queued"}, {"assistant", "nor that", "c"}}, "mine"},
		{"steers", [][3]string{{"user", "m", "idle"}, {"assistant", "first", "m"}, {"user", "b", "steering"}, {"assistant", "steered", "m"}}, "steered"},
		{"steered by it", [][3]string{{"user", "a", "idle"}, {"assistant", "first", "a"}, {"user", "m", "steering"}, {"assistant", "steered", "a"}}, "steered"},
		{"told to go on", [][3]string{{"user", "m", "idle"}, {"assistant", "first", "m"}, {"user", "auto", "idle"}, {"assistant", "done", "m"}}, "done"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := createSession(t, c, nil)
			p.handle("session.send", func(*peer, peerMessage) any { return map[string]any{"messageId": "m"} })
			sent := len(p.calls("session.send"))
			var got *AssistantMessage
			turn := async(func() (err error) {
				got, err = s.SendAndWait(testContext(t), Message{Prompt: "x"})
				return err
			})
			p.wait("session.send", sent+1)
			p.sync() // the answer has been read
			for _, e := range tt.events {
				switch e[0] {
				case "user":
					p.emit(s.ID(), "user.message", map[string]any{"content": "x", "messageId": e[1], "delivery": e[2]})
				default:
					p.emit(s.ID(), "assistant.message", map[string]any{"content": e[1], "originatingMessageId": e[2]})
				}
			}
			p.emit(s.ID(), "session.idle", map[string]any{})
			if err := await(t, "turn", turn); err != nil {
				t.Fatal(err)
			}
			if got == nil || got.Content != tt.want {
				t.Errorf("got %+v, want %q", got, tt.want)
			}
		})
	}
}

// stored waits until the server has stored an event with this text, which it does a little after it has sent the event.
func (m matrix) stored(home, id, text string) {
	m.Helper()
	for {
		journal, _ := os.ReadFile(filepath.Join(home, "session-state", id, "events.jsonl"))
		if strings.Contains(string(journal), text) {
			return
		}
		select {
		case <-m.ctx.Done():
			m.Fatalf("%q was not stored", text)
		case <-time.After(5 * time.Millisecond): // nothing signals the write
		}
	}
}

// matrixMCP is an MCP server over stdio with the tools echo, which also tells a variable of its environment, fail, and ask, which asks the
// user.
func matrixMCP() int {
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	type object = map[string]any
	send := func(m object) {
		m["jsonrpc"] = "2.0"
		_ = out.Encode(m)
	}
	result := func(id json.RawMessage, text string, failed bool) {
		send(object{"id": id, "result": object{"content": []object{{"type": "text", "text": text}}, "isError": failed}})
	}
	var asking json.RawMessage // the call that waits for the user
	for {
		var m struct {
			ID     json.RawMessage
			Method string
			Params struct {
				ProtocolVersion, Name string
				Arguments             struct{ Text string }
			}
			Result struct { // the user's answer
				Action  string
				Content struct{ Colour string }
			}
		}
		if in.Decode(&m) != nil {
			return 0
		}
		switch m.Method + " " + m.Params.Name {
		case "initialize ":
			send(object{"id": m.ID, "result": object{"protocolVersion": m.Params.ProtocolVersion, "capabilities": object{"tools": object{}},
				"serverInfo": object{"name": "tiny", "version": "1"}}})
		case "tools/list ":
			var tools []object
			for _, name := range []string{"ask", "echo", "fail"} {
				tools = append(tools, object{"name": name, "description": name, "inputSchema": object{"type": "object"}})
			}
			send(object{"id": m.ID, "result": object{"tools": tools}})
		case "tools/call echo":
			result(m.ID, m.Params.Arguments.Text+", "+os.Getenv("TINY"), false)
		case "tools/call fail":
			result(m.ID, "no luck", true)
		case "tools/call ask":
			asking = m.ID
			send(object{"id": "question", "method": "elicitation/create", "params": object{"message": "Which colour?",
				"requestedSchema": object{"type": "object", "properties": object{"colour": object{"type": "string"}}}}})
		case " ":
			result(asking, m.Result.Action+" "+m.Result.Content.Colour, false)
		default:
			if m.ID != nil {
				send(object{"id": m.ID, "result": object{}})
			}
		}
	}
}
