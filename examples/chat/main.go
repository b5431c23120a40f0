// Chat holds a conversation with Copilot in the terminal:
//
//	chat [flags] [prompt ...]
//
// Every argument is a prompt; without arguments, every line of standard input is. Answers go to standard output, all else to standard
// error. Ctrl-C aborts the running turn; a second one, or one at the prompt, leaves.
//
// It runs the Copilot CLI that it finds, with that CLI's login or with a model endpoint of your own: see the flags, which default to the
// CLI's own variables; the endpoint's key is read from COPILOT_PROVIDER_API_KEY. Without a CLI, or with -demo, a scripted server
// at the end of this file answers.
package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/textproto"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"copilot"
)

type chat struct {
	demo, yes bool
	terminal  bool                            // somebody is there to be asked
	stdin     chan string                     // its lines
	asking    sync.Mutex                      // one question at a time,
	shown     chan struct{}                   // and after what led to it
	running   atomic.Pointer[copilot.Session] // whose turn Ctrl-C aborts
}

func main() {
	var c chat
	var config copilot.SessionConfig
	provider := copilot.ProviderConfig{APIKey: os.Getenv("COPILOT_PROVIDER_API_KEY")}
	flag.BoolVar(&c.demo, "demo", false, "talk to a scripted server instead of a Copilot CLI")
	flag.BoolVar(&c.yes, "yes", false, "permit whatever the agent asks for")
	flag.StringVar(&config.Model, "model", os.Getenv("COPILOT_MODEL"), "`name` of the model")
	flag.StringVar(&provider.BaseURL, "base-url", os.Getenv("COPILOT_PROVIDER_BASE_URL"), "`URL` of a model endpoint of your own")
	flag.StringVar(&provider.Type, "provider", os.Getenv("COPILOT_PROVIDER_TYPE"), "`type` of that endpoint: openai, azure or anthropic")
	flag.Parse()
	if provider.BaseURL != "" {
		config.Provider = &provider
	}
	stdin, err := os.Stdin.Stat()
	c.terminal = err == nil && stdin.Mode()&os.ModeCharDevice != 0
	c.stdin, c.shown = make(chan string), make(chan struct{}, 1)
	if c.terminal || flag.NArg() == 0 { // otherwise it belongs to somebody else
		go c.read() // ends with standard input or the program
	}
	ctx, leave := context.WithCancel(context.Background())
	go c.interrupts(ctx, leave) // ends with the program
	err = c.run(ctx, &config, flag.Args())
	if err != nil {
		note("chat: %v", err)
	}
	switch {
	case ctx.Err() != nil || errors.Is(err, copilot.ErrAborted):
		os.Exit(130) // as shells count an interrupt
	case err != nil:
		os.Exit(1)
	}
}

// run holds the conversation. However that ends, nothing stays behind.
func (c *chat) run(ctx context.Context, config *copilot.SessionConfig, args []string) (err error) {
	client, err := c.connect(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop(client)) }()
	if !c.demo && config.Provider == nil {
		if status, err := client.AuthStatus(ctx); err == nil && !status.IsAuthenticated {
			return errors.New("not logged in: run \"copilot login\", or give -base-url and -model, or try -demo")
		}
	}

	type roll struct {
		Sides int `json:"sides" description:"how many sides the die has"`
	}
	dice := copilot.NewTool("roll_dice", "Rolls a die.", func(_ context.Context, r roll) (int, error) {
		return 1 + rand.IntN(max(r.Sides, 1)), nil
	})
	dice.SkipPermission = true // it harms nobody
	config.Streaming, config.Tools, config.OnPermission = true, []copilot.Tool{dice}, c.permission
	if c.yes {
		config.OnPermission = copilot.ApproveAll
	}
	session, err := client.CreateSession(ctx, config)
	if err != nil {
		return err
	}
	prompts, sign, interactive := c.stdin, "> ", c.terminal
	if len(args) > 0 {
		prompts, sign, interactive = make(chan string, len(args)), "", false
		for _, arg := range args {
			prompts <- arg
		}
		close(prompts)
	}
	for {
		prompt, ok := c.line(ctx, prompts, sign)
		if !ok {
			return nil
		}
		if prompt == "" {
			continue
		}
		if err := c.turn(ctx, session, prompt); err != nil {
			if !interactive || session.Context().Err() != nil {
				return err
			}
			note("%v", err) // the next prompt may do better
		}
	}
}

// connect starts the CLI or, where there is none, the demo.
func (c *chat) connect(ctx context.Context) (*copilot.Client, error) {
	if !c.demo {
		client, err := copilot.Start(ctx, nil)
		if !errors.Is(err, copilot.ErrCLINotFound) {
			return client, err
		}
		note("%v\nThis is the demo.", err)
		c.demo = true
	}
	near, far := net.Pipe()
	go demo(far) // ends when the client closes its end
	return copilot.NewClient(ctx, near, nil)
}

// stop ends the client in good order or, where that fails, by force.
func stop(client *copilot.Client) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	err := client.Stop(ctx)
	if err != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_, forced := client.ForceStopAndWait(ctx)
		err = errors.Join(err, forced)
	}
	return err
}

// turn sends a prompt and shows what comes of it.
func (c *chat) turn(ctx context.Context, session *copilot.Session, prompt string) error {
	c.running.Store(session)
	defer c.running.Store(nil)
	open := "" // id of the message whose text is being streamed
	for event, err := range session.Ask(ctx, copilot.Message{Prompt: prompt}) {
		if err != nil && open != "" {
			fmt.Println()
		}
		if lag := (*copilot.LagError)(nil); errors.As(err, &lag) {
			note("%v", err) // the terminal was too slow; the turn goes on
		} else if err != nil {
			return err
		}
		if event.AgentID != "" { // what sub-agents do is the agent's business
			continue
		}
		switch p := event.Payload().(type) {
		case *copilot.AssistantMessageDelta:
			if open != "" && open != p.MessageID { // the stream broke, and the model begins again
				fmt.Println()
			}
			fmt.Print(p.DeltaContent)
			open = p.MessageID
		case *copilot.AssistantMessage:
			if open != p.MessageID { // not every endpoint streams
				fmt.Print(p.Content)
			}
			if open = ""; p.Content != "" {
				fmt.Println()
			}
		case *copilot.ToolExecutionStart:
			note("-> %s %.200s", p.ToolName, p.Arguments)
		case *copilot.PermissionRequested:
			select {
			case c.shown <- struct{}{}:
			default:
			}
		case *copilot.ToolExecutionComplete:
			if p.Result != nil {
				note("<- %.200q", p.Result.Content)
			} else if p.Error != nil {
				note("<- failed: %.200q", p.Error.Message)
			}
		}
	}
	return nil
}

// permission asks whoever is there. Refusals come with words: the model sees them and goes on, where a bare one ends the run.
func (c *chat) permission(ctx context.Context, r copilot.PermissionRequest) (copilot.PermissionDecision, error) {
	c.asking.Lock()
	defer c.asking.Unlock()
	select {
	case <-c.shown:
	case <-time.After(time.Second): // it will not be, or was long ago
	}
	answer, there := "", false
	what := fmt.Sprintf("%s %q", r.Kind, cmp.Or(r.FullCommandText, r.FileName, r.Path, r.URL, r.ToolName, string(r.Raw)))
	if c.terminal {
		answer, there = c.line(ctx, c.stdin, "permit "+what+"? [y/N] ")
	}
	switch {
	case ctx.Err() != nil: // nobody waits for it any more
		return copilot.PermissionDecision{}, ctx.Err()
	case answer == "y":
		return copilot.ApproveOnce(), nil
	case there:
		return copilot.Reject("the user said no"), nil
	}
	note("refused: %s (-yes permits everything)", what)
	return copilot.Reject("nobody is there to permit it"), nil
}

// interrupts makes a Ctrl-C abort the running turn, once, or else leave.
func (c *chat) interrupts(ctx context.Context, leave context.CancelFunc) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	for s := range signals {
		if session := c.running.Swap(nil); session != nil && s == os.Interrupt {
			go session.Abort(ctx) // ends with ctx at the latest; the turn tells how it went
		} else {
			leave()
		}
	}
}

// line returns the next line, false at the end of the input or of ctx.
func (c *chat) line(ctx context.Context, from <-chan string, sign string) (string, bool) {
	if c.terminal {
		fmt.Fprint(os.Stderr, sign)
	}
	select {
	case line, ok := <-from:
		return line, ok
	case <-ctx.Done():
		return "", false
	}
}

func (c *chat) read() {
	in := bufio.NewScanner(os.Stdin)
	for in.Buffer(nil, 1<<20); in.Scan(); {
		c.stdin <- strings.TrimSpace(in.Text())
	}
	if in.Err() != nil {
		note("chat: standard input: %v", in.Err())
	}
	close(c.stdin)
}

func note(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

type object map[string]any

// demo is the other end of the protocol: a server that plays the same short scene for every prompt.
func demo(conn net.Conn) {
	defer conn.Close()
	in, count, session, turn, rolled, busy := bufio.NewReader(conn), 0, "", "", any(nil), false
	write := func(message object) {
		body, _ := json.Marshal(message)
		fmt.Fprintf(conn, "Content-Length: %d\r\n\r\n%s", len(body), body) // where this fails, so does the next read
	}
	event := func(kind string, data object) {
		count++
		e := object{"id": strconv.Itoa(count), "timestamp": time.Now(), "type": kind, "data": data}
		write(object{"jsonrpc": "2.0", "method": "session.event", "params": object{"sessionId": session, "event": e}})
	}
	say := func(text string) bool { // false when the client has interrupted
		id := strconv.Itoa(count)
		defer conn.SetReadDeadline(time.Time{})
		for _, word := range strings.SplitAfter(text, " ") {
			event("assistant.message_delta", object{"messageId": id, "deltaContent": word})
			conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond)) // a pause, for the looks
			if _, err := in.Peek(1); err == nil {
				return false
			}
		}
		event("assistant.message", object{"messageId": id, "content": text})
		return true
	}
	for {
		var call struct {
			ID     json.RawMessage
			Method string
			Params struct {
				SessionID, Prompt string
				Result            any
			}
		}
		header, err := textproto.NewReader(in).ReadMIMEHeader()
		if err != nil {
			return
		}
		length, _ := strconv.ParseInt(header.Get("Content-Length"), 10, 64)
		if json.NewDecoder(io.LimitReader(in, length)).Decode(&call) != nil {
			return
		}
		result := object{"success": true}
		switch call.Method {
		case "connect":
			result = object{"protocolVersion": copilot.MaxProtocolVersion, "version": "demo"}
		case "session.create":
			session = call.Params.SessionID
			result = object{"sessionId": session}
		case "session.send":
			turn, busy = fmt.Sprint("turn-", count), true
			result = object{"messageId": turn}
		}
		write(object{"jsonrpc": "2.0", "id": call.ID, "result": result})
		if !busy {
			continue
		}
		switch call.Method {
		case "session.send":
			event("user.message", object{"messageId": turn, "content": call.Params.Prompt})
			if !say("This is a demo. It repeats what you wrote, " + strconv.Quote(call.Params.Prompt) + ", and rolls a die.") {
				continue
			}
			dice := object{"requestId": turn, "toolCallId": turn, "toolName": "roll_dice", "arguments": object{"sides": 6}}
			event("tool.execution_start", dice)
			event("external_tool.requested", dice)
		case "session.tools.handlePendingToolCall":
			rolled = call.Params.Result
			event("tool.execution_complete", object{"toolCallId": turn, "success": true, "result": object{"content": rolled}})
			event("permission.requested", object{"requestId": turn, "permissionRequest": object{"kind": "shell", "fullCommandText": "date"}})
		case "session.permissions.handlePendingPermissionRequest":
			decision, _ := call.Params.Result.(map[string]any)
			if say(fmt.Sprintf("The die shows %v. The answer about running date was %v.", rolled, decision["kind"])) {
				event("session.idle", object{})
				busy = false
			}
		case "session.abort":
			event("abort", object{"reason": "user_initiated"})
			event("session.idle", object{"aborted": true})
			busy = false
		}
	}
}
